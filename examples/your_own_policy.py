"""A policy of your own, in the simulator and in a model: attention received, for the time a token was there."""

# ruff: noqa: D102 - Policy documents the methods
import argparse
from dataclasses import dataclass

from kvevict import ALL_QUERIES, Column, EvictingCache, Policy
from kvevict.lab import decode_trace, simulate
from kvevict.models import load_model


@dataclass(frozen=True, kw_only=True)
class FairShare(Policy):
    """Keeps the tokens with the most attention for their age; H2O favours old tokens."""

    queries = ALL_QUERIES

    def columns(self, budget):
        return {"sum": Column()}

    def observe(self, held, rows):
        held["sum"].add_(rows.weights.mean(2).sum(2))  # (B, H, L)

    def score(self, held):
        return held["sum"] / (held.seen - held.positions) ** 0.5  # (B, H, L)


if __name__ == "__main__":  # so that kvevict simulate --policy your_own_policy.py:FairShare can read the class
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--new", type=int, default=100, help="tokens to generate")
    options = parser.parse_args()
    mine = FairShare(sinks=4, recent=16)
    print(simulate(decode_trace(1024), [mine, "h2o", "tova"], budgets=[128]).table())
    model, tokenizer, _ = load_model(options.model)
    inputs = tokenizer("A lighthouse is a tower that", return_tensors="pt").to(model.device)
    cache = EvictingCache(model, policy=mine, budget=48)
    out = model.generate(**inputs, cache=cache, max_new_tokens=options.new, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(out[0]), cache, sep="\n")
