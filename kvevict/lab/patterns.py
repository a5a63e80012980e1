"""The six attention patterns that the adaptive-EMA design note was tested on.

The note names them and gives no formulas; these are ours. Every query head gets its own noise, so that the maximum
over heads is not the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEADS = 8
EARLY = (0, 1, 2, 5, 10)
LATE = (3, 7, 15)
REACH = 16
"""Tokens after which recency has fallen to 1/e."""
PERIOD = 20
"""Steps between two switches of the oscillating pattern."""
NOISE = 0.3

PATTERNS: dict[str, str] = {
    "uniform": "the same for every token",
    "recency": f"falls by 1/e every {REACH} tokens",
    "heavy-early": f"half on positions {', '.join(map(str, EARLY))}, half uniform",
    "heavy-late": f"half on positions {', '.join(map(str, LATE))}, half uniform",
    "mixed": f"0.4 recency, 0.4 on positions {', '.join(map(str, EARLY))}, 0.2 uniform",
    "oscillating": f"recency and heavy-early in turn, {PERIOD} steps each",
}


def pattern_rows(name: str, length: int, seed: int) -> Tensor:
    """The weights of every query, its own token included: (heads, length, length) float64, rows that sum to one."""
    steps = torch.arange(length).unsqueeze(-1)  # (q, 1)
    positions = torch.arange(length)  # (W,)
    past = (positions <= steps).double()  # (q, W)
    uniform = _normal(past)
    recency = _normal(torch.exp((positions - steps).double() / REACH) * past)
    early, late = _on(EARLY, past), _on(LATE, past)
    turns = (steps // PERIOD % 2).double()
    mean = {
        "uniform": uniform,
        "recency": recency,
        "heavy-early": 0.5 * early + 0.5 * uniform,
        "heavy-late": 0.5 * late + 0.5 * uniform,
        "mixed": 0.4 * recency + 0.4 * early + 0.2 * uniform,
        "oscillating": (1 - turns) * recency + turns * (0.5 * early + 0.5 * uniform),
    }[name]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(HEADS, length, length, generator=generator, dtype=torch.float64)
    return _normal(mean * torch.exp(NOISE * noise))


def _normal(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _on(heavy: tuple[int, ...], past: Tensor) -> Tensor:
    """All mass on the given positions, as far as they exist; before that on everything."""
    chosen = torch.zeros(past.shape[-1], dtype=torch.float64)
    chosen[[position for position in heavy if position < past.shape[-1]]] = 1
    held = past * chosen
    return _normal(torch.where(held.sum(-1, keepdim=True) > 0, held, past))
