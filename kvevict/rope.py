"""Moves stored keys to other positions, for policies that re-index the cache (StreamingLLM).

A rotary key at position p becomes the key at position p + d by one more rotation by d. Stored keys are never
changed: each forward rotates the few that move from what was stored, so nothing drifts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvevict.errors import UnsupportedModelError

EXACT_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the length seen."""


@dataclass
class Rerotation:
    """Rotates keys of one model by a difference of positions.

    frequencies: (D_rotary / 2,) float64, radians per position.
    """

    frequencies: Tensor

    def rotate(self, keys: Tensor, shift: Tensor) -> Tensor:
        """keys (..., D) moved forward by ``shift`` (...) positions."""
        half = self.frequencies.shape[0]
        exact = torch.float32 if keys.device.type == "mps" else torch.float64  # MPS has no float64
        frequencies = self.frequencies.to(device=keys.device, dtype=exact)
        angles = shift.unsqueeze(-1).to(exact) * frequencies  # (..., D_rotary / 2)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(keys.dtype)
        return turned if keys.shape[-1] == 2 * half else torch.cat([turned, keys[..., 2 * half :]], -1)

    def close_gap(self, keys: Tensor, positions: Tensor, front: int) -> Tensor:
        """A copy of keys (B, H, L, D) in which the ``front`` oldest tokens stand right before the others.

        positions: (B, H, L), -1 for empty slots; the tokens after the front ones are contiguous. The distance from
        any query to a key is then what it would be if positions had been counted inside the cache.
        """
        if not front:
            return keys
        empty = torch.iinfo(positions.dtype).max
        oldest = positions.masked_fill(positions < 0, empty).topk(min(front, positions.shape[-1]), largest=False)
        first = positions.amax(-1, keepdim=True) + 1 - (positions >= 0).sum(-1, keepdim=True)  # (B, H, 1)
        rank = torch.arange(oldest.values.shape[-1], device=positions.device)
        shift = (first + rank - oldest.values).masked_fill(oldest.values == empty, 0)  # (B, H, front)
        wide = oldest.indices.unsqueeze(-1).expand(*oldest.indices.shape, keys.shape[-1])
        return keys.scatter(2, wide, self.rotate(keys.gather(2, wide), shift))


def rerotation_for(model: nn.Module) -> Rerotation:
    """The rotation of ``model``'s keys, or UnsupportedModelError if it is not one this library reproduces exactly."""
    name = type(model).__name__
    rotaries = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
    advice = "use positions='original' (StreamingLLM's default here)"
    if not rotaries:
        raise UnsupportedModelError(f"positions='cache' needs rotary positions, and {name} has none we know: {advice}")
    rotary = rotaries[0]
    kinds = {str(getattr(m, "rope_type", "default")) for m in rotaries}
    if len(kinds) > 1 or not kinds <= set(EXACT_TYPES):
        raise UnsupportedModelError(
            f"positions='cache' is exact for RoPE types {', '.join(EXACT_TYPES)}; {name} uses "
            f"{', '.join(sorted(kinds))}, whose frequencies change with the length: {advice}"
        )
    frequencies = rotary.inv_freq
    assert isinstance(frequencies, Tensor)
    if any(not torch.equal(_frequencies(m), frequencies) for m in rotaries[1:]):
        raise UnsupportedModelError(f"positions='cache': {name} has layers with different RoPE frequencies; {advice}")
    rerotation = Rerotation(frequencies.detach().double().cpu())
    error = _self_test(model, rotary, rerotation)
    if error is None or error > 1e-4:
        raise UnsupportedModelError(
            f"positions='cache': moving keys of {name} by rotation did not give the keys of the new position "
            f"({'its rotary function has another form' if error is None else f'error {error:.1e}'}); {advice}"
        )
    return rerotation


def _frequencies(module: nn.Module) -> Tensor:
    frequencies = module.inv_freq
    assert isinstance(frequencies, Tensor)
    return frequencies


def _self_test(model: nn.Module, rotary: nn.Module, rerotation: Rerotation) -> float | None:
    """Largest error of rotate(rope(k, p), d) against rope(k, p + d), both by the model's own code."""
    apply = getattr(sys.modules.get(type(rotary).__module__), "apply_rotary_pos_emb", None)
    config = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if config is not None else None
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // getattr(
        config, "num_attention_heads", 1
    )
    if apply is None or not size:
        return None
    device = _frequencies(rotary).device
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 1, size, generator=generator).to(device)
    try:
        with torch.no_grad():
            before, after = (
                apply(keys, keys, *rotary(keys, torch.tensor([[position]], device=device)))[1] for position in (5, 117)
            )
    except (RuntimeError, TypeError, ValueError):
        return None
    moved = rerotation.rotate(before, torch.full(before.shape[:-1], 112, device=device))
    return float((moved - after).abs().max())
