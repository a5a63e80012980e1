from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvevict.policies.base import (
    GROUP_REDUCTIONS,
    Column,
    GroupReduction,
    Held,
    Policy,
    Rows,
    check_option,
    reduce_group,
)

EIGHT = 8
"""Votes that are added up together: a step changes one, and the other sums stand."""


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Keeps the tokens that the last queries attended to, with their neighbours, and those queries' own tokens.

        score = pool over `kernel` neighbours of (attention summed over the last `window` queries), per KV head

    Source: SnapKV: LLM Knows What You are Looking for Before Generation (Li et al., 2024,
    https://arxiv.org/abs/2404.14469). The defaults are the authors' `init_snapkv`.

    window: queries that vote. Costs window * 9 / 8 + 1 numbers per token and head.
    kernel: neighbours pooled together, odd; 1 is no pooling.
    pool:   "avg" (zeros beyond the ends, as the authors' code) or "max".
    recent: newest tokens that stay; None is `window`, as in the paper.
    group:  how the query heads of one KV head become one, before they are pooled.
    scores: "rolling", the last `window` queries vote, whatever they are, so that generated tokens compete;
        or "prompt", only the last prompt queries vote, once, and generated tokens rank above the prompt:
        they go, oldest first, when no unprotected prompt token is left.
    pool_over: "prefix", the tokens older than the last `window`, as in the paper (the last ones have no
        score and go last); or "held", all held tokens.
    Differs from the paper: the paper cuts the prompt once and lets generated tokens pile up; here they count
        towards the budget. The authors' code keeps a copy of a KV head for each of its query heads; here
        they share one.
    """

    name: ClassVar[str] = "snapkv"
    stacks: ClassVar[bool] = True

    recent: int | None = None
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    group: GroupReduction = "mean"
    scores: Literal["rolling", "prompt"] = "rolling"
    pool_over: Literal["prefix", "held"] = "prefix"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "window", type(self.window) is int and self.window >= 1, "a number of queries, 1 or more")
        kernel_ok = type(self.kernel) is int and self.kernel >= 1 and self.kernel % 2 == 1
        check_option(self, "kernel", kernel_ok, "an odd number of tokens: an even one would shift the scores")
        check_option(self, "pool", self.pool in ("avg", "max"), "'avg' or 'max'")
        check_option(self, "group", self.group in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")
        check_option(self, "scores", self.scores in ("rolling", "prompt"), "'rolling' or 'prompt'")
        check_option(self, "pool_over", self.pool_over in ("prefix", "held"), "'prefix' or 'held'")

    @property
    def queries(self) -> int:
        return self.window

    def columns(self, budget: int) -> dict[str, Column]:
        columns = {
            "votes": Column(shape=(self.window + 1,)),  # one per query; the last is for those that don't vote
            "sums": Column(shape=(math.ceil(self.window / EIGHT),)),
        }
        if self.scores == "prompt":
            columns["score"] = Column(fill=float("inf"))
        return columns

    def recent_for(self, budget: int | Tensor) -> int | Tensor:
        return self.window if self.recent is None else self.recent

    def observe(self, held: Held, rows: Rows) -> None:
        votes = held["votes"]
        seen, prompt = held.seen, held.prompt
        if rows.positions.shape[1] == 1 and isinstance(seen, int) and isinstance(prompt, int) and seen > prompt:
            # the usual decode step, made cheap
            if self.scores == "rolling":
                voter = (seen - 1) % self.window
                votes.select(-1, voter).copy_(reduce_group(rows.weights, self.group)[:, :, 0])
                self._sum(held, voter // EIGHT)
            return  # a generated query has no vote on a prompt
        queries = rows.positions  # (B, Q)
        voting = (queries >= 0) & (queries > queries.amax(1, keepdim=True) - self.window)
        if self.scores == "prompt":
            prompt = held.prompt.view(-1, 1) if isinstance(held.prompt, Tensor) else held.prompt
            voting = (queries >= 0) & (queries < prompt) & (queries >= prompt - self.window)
        place = torch.where(voting, queries % self.window, self.window)  # (B, Q)
        weights = reduce_group(rows.weights, self.group).transpose(-1, -2)  # (B, H, L, Q)
        votes.scatter_(-1, place[:, None, None].expand_as(weights), weights.to(votes.dtype))
        for part in range(held["sums"].shape[-1]):
            self._sum(held, part)
        if self.scores == "prompt":
            voted = voting.any(1)[:, None, None]  # (B, 1, 1)
            held["score"].copy_(torch.where(voted, self._pooled(held, held.prompt), held["score"]))

    def _sum(self, held: Held, part: int) -> None:
        """Adds up one part of the votes."""
        first = part * EIGHT
        votes = held["votes"].narrow(-1, first, min(EIGHT, self.window - first))
        torch.sum(votes, -1, out=held["sums"].select(-1, part))

    def score(self, held: Held) -> Tensor:
        return held["score"] if self.scores == "prompt" else self._pooled(held, held.seen)  # (B, H, L)

    def _pooled(self, held: Held, end: int | Tensor) -> Tensor:
        """Votes pooled over neighbours, of the tokens below ``end`` or its window; infinity for others: (B, H, L)."""
        end = end - self.window if self.pool_over == "prefix" else end
        scored = (held.positions >= 0) & (held.positions < end)
        nothing = 0.0 if self.pool == "avg" else float("-inf")
        votes = torch.where(scored, held["sums"].sum(-1), nothing)  # (B, H, L)
        order = held.oldest_first()  # empty slots pad the start, newer tokens the end
        pad = self.kernel // 2
        # windows of a padded row: several times faster on CPUs than pooling layers, which expect images
        near = F.pad(votes.gather(-1, order), (pad, pad), value=nothing).unfold(-1, self.kernel, 1)  # (B, H, L, kernel)
        pooled = near.sum(-1) / self.kernel if self.pool == "avg" else near.amax(-1)
        return torch.where(scored, torch.empty_like(pooled).scatter_(-1, order, pooled), float("inf"))
