from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvevict.policies.base import Held, Policy


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every token, whatever the budget: the reference that the others are measured against.

        score = position    (never used: nothing is evicted)

    Source: none.
    Differs from the paper: there is none.
    """

    name: ClassVar[str] = "full"

    @property
    def evicts(self) -> bool:
        return False

    def score(self, held: Held) -> Tensor:
        return held.positions  # (B, H, L)
