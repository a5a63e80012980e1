from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvevict.policies.base import (
    ALL_QUERIES,
    GROUP_REDUCTIONS,
    Column,
    GroupReduction,
    Held,
    Policy,
    Rows,
    check_option,
    query_sum,
)


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keeps the heavy hitters (the most attention summed over all queries) and the newest tokens, per KV head.

        score <- score + a      once per query, a = the query's attention over the kept tokens

    Source: H2O: Heavy-Hitter Oracle (Zhang et al., 2023, https://arxiv.org/abs/2306.14048). The authors
    published five variants; this is `h2o_hf/utils_real_drop`, which really evicts and never brings back.

    recent: newest tokens that stay; None is half of the budget, the paper's split.
    group:  how the query heads of one KV head become one; the paper has no such groups. "first" is the
        authors' later HHCache (llama-cookbook).
    Differs from the paper: a prompt is attended whole and cut once, as the authors' code does, where
        Algorithm 1 takes one token at a time; rows of a batch are not summed together as in that code, and
        sums are not kept in half precision.
    """

    name: ClassVar[str] = "h2o"
    stacks: ClassVar[bool] = True

    recent: int | None = None
    group: GroupReduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "group", self.group in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")

    @property
    def queries(self) -> int:
        return ALL_QUERIES

    def columns(self, budget: int) -> dict[str, Column]:
        return {"score": Column()}

    def recent_for(self, budget: int | Tensor) -> int | Tensor:
        return budget // 2 if self.recent is None else self.recent

    def observe(self, held: Held, rows: Rows) -> None:
        held["score"].add_(query_sum(rows.weights, self.group))  # (B, H, L)

    def score(self, held: Held) -> Tensor:
        return held["score"]  # (B, H, L)
