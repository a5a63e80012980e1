from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.policies.base import Column, Held, Policy, Rows


@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Keeps the tokens that the newest query attends to most, on average over all heads of the layer.

        score = mean over query heads of the last query's attention

    All heads of a layer keep the same tokens. Nothing is protected: the newest token may go at once.

    Source: Transformers are Multi-State RNNs (Oren et al., 2024, https://arxiv.org/abs/2401.06104), the
    layer-wise version, which the paper found the better one.
    Differs from the paper: a prompt is cut in one go by its last query, as the authors' code does, where
        the paper drops one token per step. A token that no query could see yet is kept.
    """

    name: ClassVar[str] = "tova"
    stacks: ClassVar[bool] = True

    @property
    def queries(self) -> int:
        return 1

    def columns(self, budget: int) -> dict[str, Column]:
        return {"last": Column(fill=float("inf"))}

    def observe(self, held: Held, rows: Rows) -> None:
        if rows.decode:
            held["last"].copy_(rows.weights.mean((1, 2)))  # (B, 1, L)
            return
        newest, index = rows.positions.max(1)  # (B,), each row's last real query
        index = index[:, None, None].expand(-1, 1, held.positions.shape[-1])  # (B, 1, L)
        last = rows.weights.mean((1, 2)).gather(1, index)  # (B, 1, L)
        real = (newest >= 0)[:, None, None]  # a row of pads keeps what it had
        held["last"].copy_(torch.where(real, last, held["last"]))

    def score(self, held: Held) -> Tensor:
        return held["last"][:, :1]  # (B, 1, L)
