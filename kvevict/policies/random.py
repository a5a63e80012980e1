from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvevict.policies.base import Held, Policy, check_option


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keeps a random subset of the tokens, the same one in every run.

        score = hash(seed, layer, KV head, position)

    A token's rank never changes, so at any time each subset of the text is as likely as any other. Batch
    rows share their ranks, and no random generator is touched.

    Source: the random baseline of many papers; the hash is splitmix64 (Steele et al., 2014,
    https://doi.org/10.1145/2660193.2660195).
    Differs from the paper: there is none.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "seed", type(self.seed) is int, "an integer")

    def score(self, held: Held) -> Tensor:
        heads = torch.arange(held.positions.shape[1], device=held.positions.device).view(1, -1, 1)  # (1, H, 1)
        state = _mix(heads + _signed(self.seed * 0x9E3779B97F4A7C15 + held.layer * 0xD1342543DE82EF95))
        return _mix(state + (held.positions + 1) * _signed(0x9E3779B97F4A7C15)) >> 11 & (1 << 53) - 1  # (B, H, L)


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser, on int64 that wraps around."""
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shifts right and fills with zeros, where torch's `>>` repeats the sign."""
    return z >> bits & (1 << 64 - bits) - 1


def _signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
