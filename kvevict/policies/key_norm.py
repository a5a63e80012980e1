from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.errors import PolicyError
from kvevict.policies.base import Column, Held, Policy


@dataclass(frozen=True, kw_only=True)
class KeyNorm(Policy):
    """Keeps the tokens whose keys are shortest, per KV head.

        score = - |key|     L2 norm, in float32

    A short key tends to receive much attention. Reads no attention, so it works with any kernel.

    Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (Devoto et al., 2024,
    https://arxiv.org/abs/2406.11430).
    Differs from the paper: the paper leaves the first two layers whole; here every evicting layer evicts.
    """

    name: ClassVar[str] = "key_norm"

    def columns(self, budget: int) -> dict[str, Column]:
        return {"norm": Column(dtype=torch.float32)}

    def admit(self, new: Held) -> None:
        if new.keys is None:
            raise PolicyError("KeyNorm reads keys, and a trace of attention weights has none: use it with a model")
        new["norm"].copy_(torch.linalg.vector_norm(new.keys.float(), dim=-1))  # (B, H, Q)

    def score(self, held: Held) -> Tensor:
        return -held["norm"]  # (B, H, L)
