"""What separates H2O from TOVA: their three differences, switched one by one, on the same tokens.

    python examples/h2o_or_tova.py --text wiki.test.raw

H2O sums the attention of all queries, chooses for each KV head, and keeps the recent half of its budget. TOVA takes the
newest query's attention, chooses once for all heads of a layer, and protects nothing. Between them are six policies
that nobody named. All read the same documents, each with a fresh cache, and evict after every token, as the tables of
the TOVA paper were made; a window, StreamingLLM and the full cache beside them. The documents are the rows of a batch.
"""

# ruff: noqa: D102 - Policy documents the methods
from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import ClassVar, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaForCausalLM, PreTrainedModel

from kvevict import ALL_QUERIES, Column, EvictingCache, Policy
from kvevict.bootstrap import paired_bootstrap
from kvevict.evaluation import evaluation_mode, opened, token_losses
from kvevict.host import cache_argument
from kvevict.models import load_model
from kvevict.results import markdown_table
from kvevict.text import load_text, tokenize

SWITCHES = {"attention": ("sum", "newest"), "choice": ("head", "layer"), "recent": (None, 0)}
"""What each is in H2O, and in TOVA."""
WORDS = {"sum": "all queries", "newest": "newest query", "head": "KV head", "layer": "layer", None: "half", 0: "none"}
OTHERS = ("streaming_llm", "sliding_window")
FULL = "full cache"
DRAFT = 64
"""Tokens read at once where they are read token by token."""


@dataclass(frozen=True, kw_only=True)
class Between(Policy):
    """Keeps the most attended tokens: as H2O, as TOVA, or with some of their differences.

    attention: "sum", of all queries; or "newest", of the newest query alone.
    choice:    "head", for each KV head by the mean of its query heads; or "layer", by the mean of all of them.
    recent:    newest tokens that stay; None is half of the budget.
    """

    name: ClassVar[str] = "between"
    stacks: ClassVar[bool] = True

    attention: Literal["sum", "newest"] = "sum"
    choice: Literal["head", "layer"] = "head"
    recent: int | None = None

    @property
    def queries(self) -> int:
        return ALL_QUERIES if self.attention == "sum" else 1

    def columns(self, budget: int) -> dict[str, Column]:
        return {"attention": Column(fill=0.0 if self.attention == "sum" else float("inf"))}

    def recent_for(self, budget):
        return budget // 2 if self.recent is None else self.recent

    def observe(self, held, rows):
        weights = rows.weights.mean(2)  # (B, H, Q, L)
        if self.attention == "sum":
            held["attention"].add_(weights.sum(2))
        else:
            held["attention"].copy_(weights[:, :, 0])  # the one row that was asked for; documents have no pads

    def score(self, held):
        score = held["attention"]  # (B, H, L)
        return score if self.choice == "head" else score.mean(1, keepdim=True)  # (B, 1, L) for all heads alike


H2O, TOVA = (Between(**{name: ends[end] for name, ends in SWITCHES.items()}) for end in (0, 1))
BETWEEN = [Between(**dict(zip(SWITCHES, values, strict=True))) for values in product(*SWITCHES.values())]
Losses = Mapping[Policy | str, list[Tensor]]
"""For each cache, the nats of every document's tokens."""


@torch.no_grad()
def read(
    model: PreTrainedModel, documents: Tensor, make: Callable[[], Cache], chunk: int | None = None
) -> list[Tensor]:
    """Reads documents (B, N) side by side: B times (N - 1,) nats, on the CPU.

    chunk: tokens per forward; None reads token by token, which takes the time of reading ``DRAFT`` at once: the tokens
        of a draft see what they would see one by one, and leave what they would leave.
    """
    last = documents.shape[1] - 1
    first, step = (chunk, chunk) if chunk else (1, DRAFT)  # a draft's first token has to have one before it
    ends = [*range(min(first, last), last, step), last]
    losses = []
    with evaluation_mode(model), opened(make) as cache:
        if chunk is None and isinstance(cache, EvictingCache):
            cache.activate_past_recording()  # a forward accepts the draft before it
        for start, end in pairwise([0, *ends]):
            wanted = documents[:, start + 1 : end + 1]  # (B, Q)
            logits = model(documents[:, start:end], use_cache=True, **{cache_argument(model): cache}).logits
            losses.append(token_losses(logits.flatten(0, 1), wanted.flatten()).view_as(wanted).cpu())
    return list(torch.cat(losses, 1))


@torch.no_grad()
def ungrouped(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model, changed so that every query head has a KV head of its own, a copy of the one it shared."""
    config = model.config
    group, size = config.num_attention_heads // config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    config.num_key_value_heads = config.num_attention_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.num_key_value_groups = 1
        for projection in (attention.k_proj, attention.v_proj):
            heads = projection.weight.unflatten(0, (-1, size))  # (H, D, hidden)
            projection.weight = torch.nn.Parameter(heads.repeat_interleave(group, 0).flatten(0, 1))
            projection.out_features *= group
    return model


def perplexity_of(losses: list[Tensor]) -> float:
    """exp of the mean loss of a token."""
    return float(torch.cat(losses).double().mean().exp())


def difference(first: list[Tensor], second: list[Tensor]) -> str:
    """How much more the first loses, in nats per token, with its 95 % interval; a tie where that holds 0."""
    gap = paired_bootstrap(first, second)
    return f"{'tie ' * gap.tie}{gap.difference:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"


def table(losses: Losses) -> str:
    """The perplexity of every cache, best first, and its difference from TOVA's."""
    head = ["attention of", "one choice per", "protected", "perplexity", "nats beyond TOVA's"]
    lines = []
    for cache in sorted(losses, key=lambda each: perplexity_of(losses[each])):
        if isinstance(cache, Between):
            name = {H2O: " (H2O)", TOVA: " (TOVA)"}.get(cache, "")
            cells = [WORDS[cache.attention] + name, WORDS[cache.choice], WORDS[cache.recent]]
        else:
            cells = [str(cache), "", ""]
        beyond = "" if cache == TOVA else difference(losses[cache], losses[TOVA])
        lines.append([*cells, f"{perplexity_of(losses[cache]):.2f}", beyond])
    return markdown_table(head, lines)


def switches(losses: Losses) -> str:
    """What each switch from H2O's setting to TOVA's costs, the other two as they are."""
    lines = []
    for switch, (ours, theirs) in SWITCHES.items():
        for cache in losses:
            if isinstance(cache, Between) and getattr(cache, switch) == ours:
                others = ", ".join(WORDS[getattr(cache, name)] for name in SWITCHES if name != switch)
                gap = difference(losses[replace(cache, **{switch: theirs})], losses[cache])
                lines.append([f"{WORDS[ours]} → {WORDS[theirs]}", others, gap])
    return markdown_table(["switch", "the other two", "nats more"], lines)


def main() -> None:
    """Reads the documents through every cache, and prints both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", a local folder, or a Hub id')
    parser.add_argument("--text", help="a text file; left out, WikiText-2 or Python's documentation")
    parser.add_argument("--documents", type=int, default=8, help="pieces of the text, one after the other")
    parser.add_argument("--tokens", type=int, default=512, help="of each")
    parser.add_argument("--budget", type=int, default=128, help="tokens that each cache may hold, per head and layer")
    parser.add_argument("--chunk", type=int, help="tokens per forward; left out, they are read one by one")
    parser.add_argument("--ungrouped", action="store_true", help="give every query head of a Llama its own KV head")
    options = parser.parse_args()
    model, tokenizer, description = load_model(options.model, notify=print)
    if options.ungrouped:
        model = ungrouped(model)
    text = load_text(options.text)
    ids = tokenize(tokenizer, text.text, options.documents * options.tokens).ids
    documents = ids.view(options.documents, options.tokens)
    losses: dict[Policy | str, list[Tensor]] = {}
    for cache in (*BETWEEN, *OTHERS, FULL):
        make = partial(EvictingCache, model, cache, options.budget)
        losses[cache] = read(
            model, documents, partial(DynamicCache, config=model.config) if cache == FULL else make, options.chunk
        )
    fed = "one by one" if options.chunk is None else f"{options.chunk} at a time"
    print(
        f"{description}; {text.name}, {options.documents} documents of {options.tokens} tokens, {fed}; budget "
        f"{options.budget}\n\n{table(losses)}\n{switches(losses)}"
    )


if __name__ == "__main__":
    main()
