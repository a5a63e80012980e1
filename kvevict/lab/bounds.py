"""What any policy could do: one that has seen the whole trace, and one that even brings evicted tokens back.

The lower bound is ``kvevict.policies.Random``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.lab.traces import Block, Trace
from kvevict.policies.base import ALL_QUERIES, Column, Held, Policy, Rows, reduce_group


@dataclass(frozen=True, kw_only=True)
class Clairvoyant(Policy):
    """Keeps the tokens that later queries will give the most attention, which only a replay can know.

        score = sum over the queries still to come of their attention to the token, mean over a KV head's query heads

    Source: the policybook kv-cache catalogue's idea of a bound; after Belady (1966,
    https://doi.org/10.1147/sj.52.0078).

    future: (layers, runs, H, length), the attention that each token will ever receive: ``Clairvoyant.of(trace)``.
    Differs from the source: nothing is known. It is greedy: a token that is needed much, but late, stays in the way
        of many that are needed soon. On real attention under small budgets TOVA can pass it; ``Ceiling`` cannot be
        passed.
    """

    name: ClassVar[str] = "oracle"

    future: Tensor = field(repr=False, compare=False)

    @classmethod
    def of(cls, trace: Trace) -> Clairvoyant:
        """The oracle of one trace, which is read once for it."""
        future = torch.zeros(trace.layers * trace.runs, trace.heads, trace.length, dtype=torch.float64)
        for block in trace.blocks():
            total = reduce_group(block.weights, "mean").double().sum(2)  # (T, H, W)
            future[..., : total.shape[-1]] += total
        return cls(future=future.unflatten(0, (trace.layers, trace.runs)))

    @property
    def queries(self) -> int:
        """Every query: what it gave is no longer to come."""
        return ALL_QUERIES

    def columns(self, budget: int) -> dict[str, Column]:
        """The attention still to come."""
        return {"future": Column(dtype=torch.float64)}

    def admit(self, new: Held) -> None:
        """Looks the new tokens up."""
        own = self.future[new.layer]  # (runs, H, length)
        own = own.repeat_interleave(new.positions.shape[0] // own.shape[0], 0)  # (B, H, length): budgets share a run
        new["future"].copy_(own.gather(-1, new.positions.clamp_min(0)))

    def observe(self, held: Held, rows: Rows) -> None:
        """Takes away what is past."""
        held["future"].sub_(reduce_group(rows.weights, "mean").double().sum(2))

    def score(self, held: Held) -> Tensor:
        """What is still to come."""
        return held["future"]  # (B, H, L)


class Ceiling:
    """The most that any choice of tokens can retain, query by query: each KV head's best, evicted ones included.

    It has the sums of a lane: retained and hits (B, H, G), rows (layer, run, budget), for equal budgets in all
    layers. A KV head's best tokens have the most attention on average over its query heads, or the most heavy
    hitters, so the two numbers need not come from the same choice.
    """

    def __init__(self, trace: Trace, budgets: Sequence[int]) -> None:
        self.trace, self.budgets = trace, list(budgets)
        shape = (trace.layers * trace.runs, len(self.budgets), trace.heads, trace.group)
        self._retained = torch.zeros(shape, dtype=torch.float64)
        self._hits = torch.zeros(shape, dtype=torch.float64)

    @property
    def retained(self) -> Tensor:
        """Attention mass, summed over the steps: (B, H, G), the same for all query heads of a group."""
        return self._retained.flatten(0, 1)

    @property
    def hits(self) -> Tensor:
        """Heavy hitters, summed over the steps: (B, H, G), the same for all query heads of a group."""
        return self._hits.flatten(0, 1)

    def run(self, block: Block, weights: Tensor, heavy: Tensor) -> None:
        """Adds one block. weights: (T, H, G, q, 1 + W), heavy: (T, H, G, q, k), as ``prepared`` gives."""
        own = 1 if self.trace.own else 0  # a query finds its own token besides the budget
        mass = reduce_group(weights, "mean").sort(-1, descending=True).values.double().cumsum(-1)  # (T, H, q, 1 + W)
        queries = block.start + torch.arange(weights.shape[3]).unsqueeze(-1)  # (q, 1)
        places = heavy.transpose(2, 3).flatten(-2)  # (T, H, q, G * k)
        there = (places <= queries + own).float()  # queries with few positions name later ones
        every = there.sum(-1, keepdim=True)  # (T, H, q, 1)
        best = every
        if min(self.budgets) + own < places.shape[-1]:
            votes = torch.zeros_like(mass, dtype=torch.float32).scatter_add_(-1, places, there)
            best = votes.sort(-1, descending=True).values.cumsum(-1)  # (T, H, q, 1 + W)
        for index, budget in enumerate(self.budgets):
            shown = min(budget + own, mass.shape[-1]) - 1
            self._retained[:, index] += mass[..., shown].sum(-1, keepdim=True)
            self._hits[:, index] += best[..., min(shown, best.shape[-1] - 1)].sum(-1, keepdim=True) / self.trace.group
