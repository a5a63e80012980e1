from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvevict.policies.base import Held, Policy


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Policy):
    """Keeps the newest tokens.

        score = position

    Source: the "window attention" baseline of StreamingLLM (Xiao et al., 2023,
    https://arxiv.org/abs/2309.17453), on a model trained without a window.
    Differs from the paper: tokens keep the positions they arrived with; the authors' code gives them new ones.
    """

    name: ClassVar[str] = "sliding_window"
    by_age: ClassVar[bool] = True

    def score(self, held: Held) -> Tensor:
        return held.positions  # (B, H, L), integers: exact at any length
