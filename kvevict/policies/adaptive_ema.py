from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.policies.base import (
    ALL_QUERIES,
    Column,
    Held,
    Policy,
    Rows,
    at_least,
    check_option,
    query_product,
    share_of,
)


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
        total, most = heads.sum(1), heads.amax(1)  # (B, Q, L)
        if rows.decode:
            mean = total.div_(heads.shape[1])
            self._observe_newest(held, mean, torch.lerp(mean, most, 0.6))
            return
        Q = total.shape[1]
        number = torch.arange(1, Q + 1, dtype=total.dtype, device=total.device)[None]  # (1, Q)
        if rows.start is not None:
            assert isinstance(held.budget, int)  # Rows.start says so
            beta, attention, seen = self._read(total, most, heads.shape[1], number + rows.start)
            stop = rows.start + Q
            last_due = stop - stop % _period(self.rebuild, held.budget)
            cut = max(last_due - rows.start, 0)
            for block in (slice(0, cut), slice(cut, Q)):
                if block.start == block.stop:
                    continue
                own = beta[:, block], number[:, : block.stop - block.start]
                self._learn(held, attention[:, block], seen[:, block], *own, rows.start + block.start - 1)
                if block.start < cut:
                    self._rebuild(held, last_due, None)
            return
        queries = rows.positions  # (B, Q)
        alike = dataclasses.replace(held, positions=held.positions[:, :1])  # all heads hold the same tokens
        visible = rows.visible(alike)[:, 0].to(total.dtype)  # (B, Q)
        beta, attention, seen = self._read(total, most, heads.shape[1], visible)

        # A rebuild falls due when enough queries came since the last one. The block is split there, row by row,
        # so that scores do not depend on how the text was cut into blocks.
        newest = queries.amax(1, keepdim=True)  # (B, 1)
        due = self._last_due(held, newest + 1)  # (B, 1)
        before, after = (queries >= 0) & (queries < due), queries >= due
        number = (queries - newest).to(total.dtype) + Q  # (B, Q)
        # Most blocks have nothing before a rebuild, or nothing after it. Looking costs less than working on
        # nothing, except on an accelerator, where the answer has to be waited for.
        look = queries.is_cpu
        for part in (before, after):
            if not look or bool(part.any()):
                own = torch.where(part, beta, 1.0), torch.where(part, number, 0.0)
                self._learn(held, attention, seen, *own, newest - Q)
                if part is before:
                    self._rebuild(held, due.unsqueeze(-1), before.any(1)[:, None, None])

    def _read(self, total: Tensor, most: Tensor, heads: int, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What rows say: beta (B, Q), `s` and whether a token was seen, 1 or 0 (B, Q, L).

        total, most: (B, Q, L), sum and maximum over the heads, both written over.
        visible:     (B | 1, Q), how many tokens each query could see.
        """
        given = total.sum(-1).clamp_min_(torch.finfo(total.dtype).tiny)  # (B, Q), rows may sum below one
        entropy = (given.log() - _negative_entropy(total).squeeze(-1) / given) / visible.clamp_min(2).log()
        beta = entropy.clamp_(0, 1).mul_(self.beta_high - self.beta_low).add_(self.beta_low)
        attention = most.mul_(0.6).add_(total, alpha=0.4 / heads)
        return beta, attention, total.gt_((heads / visible).unsqueeze(-1))  # a bool result takes four times as long

    def _learn(
        self, held: Held, attention: Tensor, seen: Tensor, beta: Tensor, number: Tensor, base: int | Tensor
    ) -> None:
        """Adds queries to `importance` and `seen_at`; a query with beta 1 and number 0 adds nothing.

        number + base is a query's position: (B | 1, Q), and an int or (B, 1).
        """
        if beta.shape[1] == 1:
            held["importance"].lerp_(attention, (1 - beta).unsqueeze(-1))
        else:
            kept = beta.flip(1).cumprod(1).flip(1)  # (B, Q), product of this beta and the later ones
            shares = torch.nn.functional.pad(kept[:, 1:], (0, 1), value=1.0).sub_(kept)  # what then is left of 1 - beta
            held["importance"].mul_(kept[:, :1, None]).add_(query_product(shares, attention))
        last = (seen * number.unsqueeze(-1)).amax(1).long()  # (B, L)
        held["seen_at"].clamp_min_(torch.where(last > 0, last + base, -1).unsqueeze(1))

    def _observe_newest(self, held: Held, mean: Tensor, attention: Tensor) -> None:
        """``observe`` for a decode step, where what costs is the number of tensor operations: both (B, 1, L)."""
        assert isinstance(held.seen, int) and isinstance(held.budget, int)  # Rows.decode says so
        visible = mean.shape[-1]
        most = math.log(max(2, visible))  # the entropy of uniform attention
        total = mean.sum(-1, keepdim=True).clamp_min_(torch.finfo(mean.dtype).tiny)  # (B, 1, 1)
        entropy = total.log().addcdiv_(_negative_entropy(mean), total, value=-1).clamp_(0, most)  # (B, 1, 1)
        gain = entropy.mul_((self.beta_low - self.beta_high) / most).add_(1 - self.beta_low)  # 1 - beta
        held["importance"].lerp_(attention, gain)
        held["seen_at"].masked_fill_(mean > 1 / visible, held.seen - 1)
        if held.seen % _period(self.rebuild, held.budget) == 0:  # under one budget, all rebuilds are at its multiples
            self._rebuild(held, held.seen, None)

    def score(self, held: Held) -> Tensor:
        score = held["score"]
        return score if score.shape[1] == 1 else score.narrow(1, 0, 1)  # (B, 1, L)

    def _last_due(self, held: Held, seen: Tensor) -> Tensor:
        """How many queries the row has at its newest rebuild, given that it now has ``seen``: both (B, 1)."""
        last = held["scored_at"][:, 0].amax(-1, keepdim=True)  # (B, 1)
        if isinstance(held.budget, Tensor):
            return seen - (seen - last) % at_least(share_of(self.rebuild, held.budget.view(-1, 1)), 1)
        return seen - (seen - last) % _period(self.rebuild, held.budget)

    def _rebuild(self, held: Held, due: int | Tensor, rows: Tensor | None) -> None:
        """Scores the tokens below ``due`` as of that moment, in the given rows, or in all of them: both (B, 1, 1)."""
        # all heads hold the same tokens
        positions, importance, seen_at = held.positions[:, :1], held["importance"][:, :1], held["seen_at"][:, :1]
        since = (due - torch.maximum(seen_at, positions)).to(importance.dtype)  # and one
        age = (due - 1 - positions).to(importance.dtype)
        score = (self.importance * importance).add_(since.reciprocal_(), alpha=self.recency)
        score.add_(age.mul_(0.01).add_(1).reciprocal_(), alpha=self.age)
        known = positions < due
        score, scored_at = score.masked_fill_(~known, float("inf")), known * due
        if rows is not None:
            score = torch.where(rows, score, held["score"])
            scored_at = torch.where(rows, scored_at, held["scored_at"])
        held["score"].copy_(score)
        held["scored_at"].copy_(scored_at)


def _negative_entropy(shares: Tensor) -> Tensor:
    """Sum of x * log(x), 0 for 0: (B, Q, L) -> (B, Q, 1). On long rows much faster than ``torch.special.entr``."""
    return shares.log().mul_(shares).nansum(-1, keepdim=True)  # log(0) * 0 is NaN, and the only one there can be


@functools.lru_cache(maxsize=64)
def _period(rebuild: float, budget: int) -> int:
    """Queries from one rebuild to the next."""
    return at_least(share_of(rebuild, budget), 1)
