"""The upper bound: a policy that has seen the whole trace. The lower one is ``kvevict.policies.Random``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.lab.traces import Trace
from kvevict.policies.base import ALL_QUERIES, Column, Held, Policy, Rows, reduce_group


@dataclass(frozen=True, kw_only=True)
class Clairvoyant(Policy):
    """Keeps the tokens that later queries will give the most attention, which only a replay can know.

        score = sum over the queries still to come of their attention to the token, mean over a KV head's query heads

    Source: the policybook kv-cache catalogue's idea of a bound; after Belady (1966,
    https://doi.org/10.1147/sj.52.0078).

    future: (layers, runs, H, length), the attention that each token will ever receive: ``Clairvoyant.of(trace)``.
    Differs from the source: it decides greedily, token by token, so a better order of evictions may exist; no
        policy that cannot see the future is expected to reach it.
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
