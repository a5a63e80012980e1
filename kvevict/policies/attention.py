from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.policies.base import ALL_QUERIES, Column, Held, Policy, Rows, check_option


@dataclass(frozen=True, kw_only=True)
class Attention(Policy):
    """Keeps the tokens that received the most attention so far, on average over all heads of the layer.

        score <- decay * score + a      once per query; a = mean over query heads of the query's attention

    All heads of a layer keep the same tokens.

    Source: "Attention-Based Eviction", Language AI Handbook, chapter KV Cache Compression. With decay < 1 it
    is the forgetting score of A2SF (2024, https://arxiv.org/abs/2407.20485), shared by the layer.

    decay: in (0, 1]. 1, the handbook's, never forgets; towards 0 it becomes TOVA. Counted in queries, so
        that feeding a prompt in pieces changes nothing.
    Differs from the source: any number of tokens and batch rows at once (the handbook's code is cut for one
        row); A2SF scores each head alone.
    """

    name: ClassVar[str] = "attention"
    stacks: ClassVar[bool] = True

    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(
            self, "decay", type(self.decay) in (int, float) and 0 < self.decay <= 1, "a number above 0 and up to 1"
        )

    @property
    def queries(self) -> int:
        return ALL_QUERIES

    def columns(self, budget: int) -> dict[str, Column]:
        return {"score": Column()}

    def observe(self, held: Held, rows: Rows) -> None:
        attention = rows.weights.mean((1, 2))  # (B, Q, L)
        real = (rows.positions >= 0).to(attention.dtype)  # (B, Q)
        left = real.flip(1).cumsum(1).flip(1)  # (B, Q), this query and the later ones
        gain = torch.pow(self.decay, left - real)  # (B, Q), a pad's weights are zero
        added = (gain.unsqueeze(-1) * attention).sum(1)  # (B, L)
        held["score"].mul_(torch.pow(self.decay, left[:, :1, None])).add_(added.unsqueeze(1))

    def score(self, held: Held) -> Tensor:
        return held["score"][:, :1]  # (B, 1, L)
