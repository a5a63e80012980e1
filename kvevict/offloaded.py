"""Keys and values on the CPU while no forward is under way in their layer, as transformers' ``offloading=True``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvevict.layer import EvictingLayer


class OffloadedLayer(EvictingLayer):
    """Holds at most its budget of tokens per KV head, whose keys and values live on the CPU between forwards.

    Positions, scores and whatever else is small stay where the model is.
    Differs from transformers: copies are not started ahead of the layer that needs them.
    """

    stays_put = False

    def reserve(self, tokens: int) -> None:
        """Finds slots for the new tokens, and fetches what is held."""
        super().reserve(tokens)
        assert self.positions is not None and self.keys is not None and self.values is not None
        self.keys, self.values = fetch(self.keys, self.positions.device), fetch(self.values, self.positions.device)

    def settle(self, rescore: Callable[[Tensor], Tensor] | None = None) -> None:
        """Evicts down to the budget, then sends keys and values away."""
        super().settle(rescore)
        assert self.keys is not None and self.values is not None
        self.keys, self.values = send_away(self.keys), send_away(self.values)


def fetch(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on the device that needs it."""
    return tensor.to(device)


def send_away(tensor: Tensor) -> Tensor:
    """``tensor`` on the CPU."""
    return tensor.to("cpu")
