"""A policy of your own: attention received, divided by how long a token was there to receive it."""

# ruff: noqa: D102 - Policy documents the methods
import argparse
from dataclasses import dataclass

from kvevict import ALL_QUERIES, Column, EvictingCache, Policy
from kvevict.models import load_model


@dataclass(frozen=True, kw_only=True)
class FairShare(Policy):
    """Keeps the tokens with the most attention for their age; H2O favours old tokens."""

    power: float = 0.5  # 0 is H2O, 1 is the plain mean

    @property
    def queries(self):
        return ALL_QUERIES

    def columns(self, budget):
        return {"sum": Column()}

    def observe(self, held, rows):
        held["sum"].add_(rows.weights.mean(2).sum(2))  # (B, H, L)

    def score(self, held):
        return held["sum"] / (held.seen - held.positions) ** self.power  # (B, H, L)


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="smollm2")
parser.add_argument("--new", type=int, default=100, help="tokens to generate")
options = parser.parse_args()
model, tokenizer, _ = load_model(options.model)
inputs = tokenizer("A lighthouse is a tower that", return_tensors="pt").to(model.device)
cache = EvictingCache(model, policy=FairShare(sinks=4, recent=16), budget=48)
out = model.generate(**inputs, cache=cache, max_new_tokens=options.new, pad_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(out[0]), cache, sep="\n")
