from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from kvevict.policies.base import check_option
from kvevict.policies.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """Keeps what SnapKV keeps, but more of it in early layers and less in late ones.

        tokens of layer l of m = W + first - l * (first - last) / (m - 1)
        last = (budget - W) / beta,  first = 2 * (budget - W) - last,  W = protected tokens

    Source: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling (Cai et al., 2024,
    https://arxiv.org/abs/2406.02069).

    beta:     how pointed the pyramid is: 1 is SnapKV's equal shares; 20 in the paper.
    rounding: "exact", the sum over the layers is the budget times the layers, the tokens lost to rounding go
        to the first layers, and a layer has room for one token beside the protected ones where the
        budget allows; or "authors", the numbers of the authors' code, which spend up to 4 % more and are
        even for prompts below 2 * (budget - window).
    Differs from the paper: see `rounding`, and SnapKV. The paper protects 8 tokens, here `window` is 32.
    """

    name: ClassVar[str] = "pyramidkv"

    beta: float = 20
    rounding: Literal["exact", "authors"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        beta_ok = type(self.beta) in (int, float) and 1 <= self.beta < float("inf")
        check_option(self, "beta", beta_ok, "a number, 1 or more")
        check_option(self, "rounding", self.rounding in ("exact", "authors"), "'exact' or 'authors'")

    @property
    def prompt_sets_budgets(self) -> bool:
        return self.rounding == "authors"

    def layer_budgets(self, budget: int, layers: int, prompt: int | None = None) -> list[int]:
        if self.rounding == "authors":
            return self._authors(budget, layers, prompt)
        protected = self.least()
        free = budget - protected
        if layers == 1 or free <= 0:
            return [budget] * layers
        last = max(free / Fraction(repr(float(self.beta))), Fraction(1))
        first = 2 * free - last
        tokens = [protected + int(first - layer * (first - last) / (layers - 1)) for layer in range(layers)]
        left = budget * layers - sum(tokens)
        return [kept + (layer < left) for layer, kept in enumerate(tokens)]

    def _authors(self, budget: int, layers: int, prompt: int | None) -> list[int]:
        free = budget - self.window
        if layers == 1 or prompt is None or prompt < budget or prompt < 2 * free:
            return [budget] * layers
        last = int(free // self.beta)
        first = 2 * free - last
        if first >= prompt - self.window:
            first = prompt - self.window
            last = 2 * free - first
        step = (first - last) // (layers - 1)
        return [first - layer * step + self.window for layer in range(layers)]
