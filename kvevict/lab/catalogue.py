"""The policies as the policybook catalogue runs them: its options are not the methods' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvevict.policies import H2O, TOVA, PyramidKV, Scissorhands, SlidingWindow, SnapKV, StreamingLLM
from kvevict.policies.base import Policy, check_option


@dataclass(frozen=True, kw_only=True)
class CataloguePyramidKV(PyramidKV):
    """Keeps what SnapKV keeps, under the catalogue's own layer budgets.

        tokens of layer k of L = 2 * budget * (r * (L - 1) - k * (r - 1)) / ((r + 1) * (L - 1)), rounded down

    Source: the policybook kv-cache catalogue; the idea is PyramidKV's (2024, https://arxiv.org/abs/2406.02069).

    ratio: budget of the first layer over that of the last.
    Differs from the paper: a ratio takes the place of `beta` and `rounding`, and no tokens are set apart.
    """

    name: ClassVar[str] = "pyramidkv"

    ratio: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "ratio", type(self.ratio) is int and self.ratio >= 1, "an integer, 1 or more")

    def layer_budgets(self, budget: int, layers: int, prompt: int | None = None) -> list[int]:
        """Tokens per KV head of each layer, and never fewer than the recent tokens and one more."""
        if layers == 1:
            return [budget]
        r, last = self.ratio, layers - 1
        tokens = [2 * budget * (r * last - layer * (r - 1)) // ((r + 1) * last) for layer in range(layers)]
        return [max(each, self.least() + 1) for each in tokens]


CATALOGUE: dict[str, Policy] = {
    "tova": TOVA(),
    "snapkv": SnapKV(window=16, kernel=7, pool="max", pool_over="held", recent=32),
    "pyramidkv": CataloguePyramidKV(window=16, kernel=7, pool="max", pool_over="held", recent=32),
    "streaming_llm": StreamingLLM(sinks=4),
    "h2o": H2O(recent=32),
    "scissorhands": Scissorhands(window=None, drop=0, recent=32),
    "sliding_window": SlidingWindow(),
}
"""By the names of ``kvevict.policies.POLICIES``, in the order of the catalogue's table."""

PUBLISHED_RETAINED: dict[tuple[str, int], float] = {
    (name, budget): figure
    for name, figures in {
        "tova": (0.7781, 0.8240, 0.8859),
        "snapkv": (0.7834, 0.8212, 0.8880),
        "pyramidkv": (0.7834, 0.8212, 0.8880),
        "streaming_llm": (0.7367, 0.7862, 0.8662),
        "h2o": (0.6439, 0.7149, 0.7844),
        "scissorhands": (0.6413, 0.7114, 0.7847),
        "sliding_window": (0.5966, 0.6555, 0.7541),
    }.items()
    for budget, figure in zip((256, 512, 1024), figures, strict=True)
}
"""Retained attention mass on decode-4096, seed 7, as the catalogue prints it."""

PUBLISHED_RECALL: dict[tuple[str, int], float] = {("h2o", 512): 0.9137}
"""Heavy-hitter recall, the one figure that the catalogue prints."""
