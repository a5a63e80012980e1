from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvevict.policies.base import Held, Policy, check_option


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keeps the first few tokens (the attention sinks) and the newest ones.

        score = position,  the first `sinks` tokens are protected

    Source: Efficient Streaming Language Models with Attention Sinks (Xiao et al., 2023,
    https://arxiv.org/abs/2309.17453).

    sinks:     4 in the paper.
    positions: what attention takes for the place of a kept token: "original", its index in the text; or
        "cache", its index among the kept tokens, as the paper does, so that text may outgrow the lengths
        the model was trained on.
    Differs from the paper: positions are "original" unless asked for; a prompt is attended whole and cut
        once, where the paper's perplexities feed one token at a time.
    """

    name: ClassVar[str] = "streaming_llm"
    by_age: ClassVar[bool] = True

    sinks: int = 4
    positions: Literal["original", "cache"] = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self, "positions", self.positions in ("original", "cache"), "'original' or 'cache'")

    def score(self, held: Held) -> Tensor:
        return held.positions  # (B, H, L), integers: exact at any length
