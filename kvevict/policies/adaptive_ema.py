from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.policies.base import ALL_QUERIES, Column, Held, Policy, Rows, at_least, check_option, share_of


@dataclass(frozen=True, kw_only=True)
class AdaptiveEMA(Policy):
    """Keeps the tokens with the best mix of decayed attention, recency and youth; all layers vote.

        s          = 0.6 * max + 0.4 * mean over the layer's query heads of the query's attention
        beta       = beta_low + (beta_high - beta_low) * entropy(mean over heads) / log(visible tokens)
        importance <- beta * importance + (1 - beta) * s        once per query
        score      = 0.60 * importance + 0.25 / (1 + queries since seen) + 0.15 / (1 + 0.01 * age in tokens)

    Focused attention (low entropy) forgets fast, diffuse attention slowly.

    Source: "Adaptive H2O-Style Eviction with Entropy-Aware Decay", a design note, not a paper. Nearest
    published: A2SF (2024, https://arxiv.org/abs/2407.20485), whose decay is constant.

    beta_low, beta_high:      range of the decay, in [0, 1].
    importance, recency, age: weights of the three parts of the score.
    rebuild: share of the budget, counted in queries, after which scores are computed anew. In between, the
        order of eviction stands, and tokens that came since stay. 0 computes them for every query.
    Differs from the note: its code marks every cached token as seen at every step, which makes recency the
        same for all. Here a token is seen when it arrives and when a query gives it more than the uniform
        share, 1/visible, of the mean attention. A sort replaces the heap.
    """

    name: ClassVar[str] = "adaptive_ema"
    stacks: ClassVar[bool] = True
    consensus: ClassVar[bool] = True

    beta_low: float = 0.70
    beta_high: float = 0.98
    importance: float = 0.60
    recency: float = 0.25
    age: float = 0.15
    rebuild: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("beta_low", "beta_high", "rebuild"):
            value = getattr(self, option)
            check_option(self, option, type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1")
        check_option(self, "beta_high", self.beta_low <= self.beta_high, f"at least beta_low={self.beta_low}")
        for option in ("importance", "recency", "age"):
            value = getattr(self, option)
            ok = type(value) in (int, float) and 0 <= value < float("inf")
            check_option(self, option, ok, "a weight, 0 or more")

    @property
    def queries(self) -> int:
        return ALL_QUERIES

    def columns(self, budget: int) -> dict[str, Column]:
        return {
            "importance": Column(),
            "seen_at": Column(fill=-1, dtype=torch.int64),  # position of the last query that saw the token
            "score": Column(fill=float("inf")),  # as of the last rebuild
            "scored_at": Column(dtype=torch.int64),  # the row's queries at that moment, 0 if the token came since
        }

    def observe(self, held: Held, rows: Rows) -> None:
        heads = rows.weights.flatten(1, 2)  # (B, heads, Q, L)
        mean = heads.mean(1)  # (B, Q, L)
        attention = 0.6 * heads.amax(1) + 0.4 * mean  # (B, Q, L)
        visible = rows.visible(held)[:, 0].to(mean.dtype)  # (B, Q), the same in all heads
        seen = mean > visible.reciprocal().unsqueeze(-1)  # (B, Q, L)

        share = mean / mean.sum(-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)  # rows may sum below one
        entropy = (torch.special.entr(share).sum(-1) / visible.clamp_min(2).log()).clamp(0, 1)  # (B, Q)
        beta = self.beta_low + (self.beta_high - self.beta_low) * entropy  # (B, Q)

        # A rebuild falls due when enough queries came since the last one. The block is split there, row by row,
        # so that scores do not depend on how the text was cut into blocks.
        queries = rows.positions  # (B, Q)
        due = self._last_due(held, queries.amax(1, keepdim=True) + 1)  # (B, 1)
        before, after = (queries >= 0) & (queries < due), queries >= due
        # Most decode steps have nothing before a rebuild, or nothing after it. Looking costs less than working on
        # nothing, except on an accelerator, where the answer has to be waited for.
        look = queries.device.type == "cpu"
        if not look or bool(before.any()):
            self._learn(held, attention, seen, torch.where(before, beta, 1.0), torch.where(before, queries, -1))
            self._rebuild(held, due.unsqueeze(-1), before.any(1)[:, None, None])
        if not look or bool(after.any()):
            self._learn(held, attention, seen, torch.where(after, beta, 1.0), torch.where(after, queries, -1))

    def score(self, held: Held) -> Tensor:
        return held["score"][:, :1]  # (B, 1, L)

    def _last_due(self, held: Held, seen: Tensor) -> Tensor:
        """How many queries the row has at its newest rebuild, given that it now has ``seen``: both (B, 1)."""
        last = held["scored_at"][:, 0].amax(-1, keepdim=True)  # (B, 1)
        budget = held.budget.view(-1, 1) if isinstance(held.budget, Tensor) else held.budget
        return seen - (seen - last) % at_least(share_of(self.rebuild, budget), 1)

    def _learn(self, held: Held, attention: Tensor, seen: Tensor, beta: Tensor, queries: Tensor) -> None:
        """Adds queries to `importance` and `seen_at`; a query with beta 1 and position -1 adds nothing."""
        kept = beta.flip(1).cumprod(1).flip(1)  # (B, Q), product of this beta and the later ones
        later = torch.cat([kept[:, 1:], torch.ones_like(kept[:, :1])], 1)  # (B, Q), of the later ones alone
        added = ((later - kept).unsqueeze(-1) * attention).sum(1, keepdim=True)  # (B, 1, L)
        held["importance"].mul_(kept[:, :1, None]).add_(added)
        last = torch.where(seen, queries.unsqueeze(-1), -1).amax(1, keepdim=True)  # (B, 1, L)
        held["seen_at"].copy_(torch.maximum(held["seen_at"], last))

    def _rebuild(self, held: Held, due: Tensor, rows: Tensor) -> None:
        """Scores the tokens below ``due`` as of that moment, in the given rows; both (B, 1, 1)."""
        importance = held["importance"]
        since = (due - 1 - torch.maximum(held["seen_at"], held.positions)).to(importance.dtype)
        age = (due - 1 - held.positions).to(importance.dtype)
        score = self.importance * importance + self.recency / (1 + since) + self.age / (1 + 0.01 * age)
        known = held.positions < due
        held["score"].copy_(torch.where(rows, score.masked_fill(~known, float("inf")), held["score"]))
        held["scored_at"].copy_(torch.where(rows, known * due, held["scored_at"]))
