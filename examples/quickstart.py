"""Generates the same text with the full cache and with an evicting one, and prints what each holds.

python examples/quickstart.py [--model PATH_OR_HUB_ID] [--policy h2o] [--budget 128] [--new 200]
"""

import argparse
from pydoc_data.topics import topics

from transformers import DynamicCache

from kvevict import EvictingCache
from kvevict.evaluation import cache_bytes
from kvevict.models import load_model

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="smollm2", help='"smollm2", a local folder, or a Hub id')
parser.add_argument("--policy", default="h2o")
parser.add_argument("--budget", type=int, default=128)
parser.add_argument("--new", type=int, default=200, help="tokens to generate")
options = parser.parse_args()

model, tokenizer, description = load_model(options.model)
print(description)
inputs = tokenizer(topics["while"], return_tensors="pt").to(model.device)  # a page of Python's documentation
prompt = inputs["input_ids"].shape[1]

with EvictingCache(model, policy=options.policy, budget=options.budget) as evicting:
    for cache in (DynamicCache(config=model.config), evicting):
        out = model.generate(
            **inputs, cache=cache, max_new_tokens=options.new, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        print(f"\n{type(cache).__name__}, {cache_bytes(cache):,} bytes after {cache.get_seq_length()} tokens:")
        print(tokenizer.decode(out[0, prompt:]))
print()
print(evicting)
