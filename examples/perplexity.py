"""Perplexity of a text through the full cache and through policies, token by token, with intervals."""

import argparse
from functools import partial

from transformers import DynamicCache

from kvevict import EvictingCache
from kvevict.bootstrap import paired_bootstrap
from kvevict.evaluation import perplexity
from kvevict.models import load_model
from kvevict.protocols import streaming
from kvevict.text import load_text, tokenize

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--text", help="a text file; left out, WikiText-2 or Python's documentation")
parser.add_argument("--tokens", type=int, default=512)
parser.add_argument("--budget", type=int, default=128)
options = parser.parse_args()

model, tokenizer, _ = load_model(options.model)
ids = tokenize(tokenizer, load_text(options.text).text, options.tokens).ids
full = perplexity(model, ids, partial(DynamicCache, config=model.config), protocol=streaming())
print(f"{full.protocol}, {len(full.nll)} tokens predicted; full cache {full.perplexity:.2f}")
for policy in ("sliding_window", "streaming_llm", "h2o", "tova"):
    result = perplexity(model, ids, partial(EvictingCache, model, policy, options.budget), protocol=streaming())
    difference = paired_bootstrap([result.nll], [full.nll])  # nats per token
    verdict = "tie" if difference.tie else f"{difference.difference:+.3f} nats"
    print(
        f"{policy:15} {result.perplexity:.2f}, after the budget {result.perplexity_after(options.budget):.2f}; "
        f"{verdict} [{difference.low:+.3f}, {difference.high:+.3f}]"
    )
