from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvevict.policies.base import (
    ALL_QUERIES,
    GROUP_REDUCTIONS,
    Column,
    GroupReduction,
    Held,
    Policy,
    Rows,
    at_least,
    check_option,
    reduce_group,
    share_of,
)


@dataclass(frozen=True, kw_only=True)
class Scissorhands(Policy):
    """Keeps the tokens that were least often unimportant to the last queries, per KV head.

        score = - (how many of the last `window` queries had a < 1/t),  a = attention the token received

    Source: Scissorhands: Exploiting the Persistence of Importance Hypothesis (Liu et al., 2023,
    https://arxiv.org/abs/2305.17118), Algorithm 2.

    window: queries remembered, as bits: window / 8 bytes per token and head. None remembers all of them
        and counts the opposite, score = how many queries had a > 1/t, as the policybook catalogue does.
    recent: newest tokens that stay.
    drop:   share of the budget evicted at once when the budget is outgrown; at least one token.
    level:  what t counts: "held", the kept tokens that the query could see (1/t is then the uniform share);
        or "seen", all tokens of the text up to the query.
    group:  how the query heads of one KV head become one, before they are compared.
    Differs from the paper: its listing protects `[:-r]` where its text says the last r, and so do we; every
        layer gets the same budget, where the paper gives later layers more; ties evict the oldest.
    """

    name: ClassVar[str] = "scissorhands"

    recent: int | None = 10
    window: int | None = 400
    drop: float = 0.5
    level: Literal["held", "seen"] = "held"
    group: GroupReduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        window_ok = self.window is None or (type(self.window) is int and self.window >= 1)
        check_option(self, "window", window_ok, "a number of queries, 1 or more, or None for all of them")
        drop_ok = type(self.drop) in (int, float) and 0 <= self.drop <= 1
        check_option(self, "drop", drop_ok, "a share of the budget from 0 (one token at a time) to 1")
        check_option(self, "level", self.level in ("held", "seen"), "'held' or 'seen'")
        check_option(self, "group", self.group in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")

    @property
    def queries(self) -> int:
        return ALL_QUERIES if self.window is None else self.window

    def columns(self, budget: int) -> dict[str, Column]:
        if self.window is None:
            return {"important": Column(dtype=torch.int32)}
        return {"history": Column(shape=((self.window + 7) // 8,), dtype=torch.uint8)}

    def at_once(self, budget: int | Tensor) -> int | Tensor:
        least = super().at_once(budget)  # 1, unless `evict_every` says otherwise
        share = at_least(share_of(self.drop, budget), 1)
        return max(share, least) if isinstance(budget, int) else torch.maximum(*map(torch.as_tensor, (share, least)))

    def observe(self, held: Held, rows: Rows) -> None:
        weights = reduce_group(rows.weights, self.group)  # (B, H, Q, L)
        queries = rows.positions[:, None]  # (B, 1, Q)
        t = rows.visible(held) if self.level == "held" else (queries + 1).clamp_min(1)
        uniform = t.to(weights.dtype).reciprocal().unsqueeze(-1)  # (B, H | 1, Q, 1)
        if self.window is None:
            held["important"].add_((weights > uniform).sum(2))  # a pad's weights are zero
            return
        slots = held.positions.unsqueeze(2)  # (B, H, 1, L)
        unimportant = (weights < uniform) & (slots <= queries.unsqueeze(-1))  # (B, H, Q, L)
        self._write(held["history"], unimportant.transpose(-1, -2), rows.positions, self.window)

    def _write(self, history: Tensor, marks: Tensor, positions: Tensor, window: int) -> None:
        """Puts each query's mark into its bit, number position % window, in place of the query before it there.

        history: (B, H, L, bytes) uint8; marks: (B, H, L, Q) bool; positions: (B, Q).
        """
        B, H, L, Q = marks.shape
        newest = positions.amax(1, keepdim=True)
        counted = (positions >= 0) & (positions > newest - window)  # (B, Q)
        place = positions.clamp_min(0) % window
        byte = place // 8  # (B, Q)
        bit = torch.where(counted, 1 << place % 8, 0).to(torch.uint8)  # (B, Q), 0 for pads: they own no bit
        owned = bit.new_zeros(B, history.shape[-1]).scatter_add_(-1, byte, bit)  # (B, bytes)
        added = torch.zeros_like(history).scatter_add_(
            -1, byte[:, None, None].expand(B, H, L, Q), marks * bit[:, None, None]
        )
        history.bitwise_and_(~owned[:, None, None]).bitwise_or_(added)

    def score(self, held: Held) -> Tensor:
        if self.window is None:
            return held["important"]  # (B, H, L)
        bits = held["history"]
        bits = (bits & 0x55) + (bits >> 1 & 0x55)  # ones in every 2 bits
        bits = (bits & 0x33) + (bits >> 2 & 0x33)  # in every 4
        bits = (bits & 0x0F) + (bits >> 4)  # in the byte
        return -bits.sum(-1)  # (B, H, L) int64
