"""The synthetic decode trace of the policybook catalogue, bit for bit.

Each query attends to four sinks (0.15), its 64 neighbours (0.55), 32 heavy hitters that are drawn again every 512
steps (0.25), and everything (0.05). Sums are float64 in a fixed order; only the normalised weights are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

SINK_WEIGHTS = (0.06, 0.045, 0.03, 0.015)
SINK_MASS, LOCAL_MASS, HEAVY_MASS, NOISE_MASS = 0.15, 0.55, 0.25, 0.05
LOCAL = 64
HEAVY = 32
HEAVY_FROM = 128
REDRAW = 512
BLOCK = 256
"""Queries per block: a block of a trace of 4,096 tokens takes 8 MB while it is made."""

_MASK = 0xFFFFFFFF


def decode_rows(seed: int, length: int) -> Iterator[tuple[int, Tensor]]:
    """Blocks (position of the first query, weights (q, W) float32) for the queries 1 to ``length`` - 1.

    The query at t covers the positions 0 to t - 1; later columns are zero.
    """
    heavy = heavy_positions(seed, length)
    for start in range(1, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield start, _rows(torch.arange(start, stop), heavy)


def heavy_positions(seed: int, length: int) -> dict[int, list[int]]:
    """The heavy hitters by the step at which they were drawn, heaviest first."""
    numbers = xoshiro128(seed)
    drawn = {}
    for step in [HEAVY_FROM, *range(REDRAW, length, REDRAW)]:
        positions: dict[int, None] = {}  # in order of first appearance
        while len(positions) < HEAVY:
            positions[next_int(numbers, step - LOCAL - 4) + 4] = None
        drawn[step] = list(positions)
    return drawn


def xoshiro128(seed: int) -> Iterator[int]:
    """The 32-bit numbers of xoshiro128** (Blackman and Vigna, 2018), seeded by splitmix32."""
    state = []
    for i in range(1, 5):
        z = seed + i * 0x9E3779B9 & _MASK
        z = (z ^ z >> 16) * 0x21F0AAAD & _MASK
        z = (z ^ z >> 15) * 0x735A2D97 & _MASK
        state.append(z ^ z >> 15)
    a, b, c, d = state
    while True:
        yield _rotated(b * 5 & _MASK, 7) * 9 & _MASK
        shifted = b << 9 & _MASK
        c ^= a
        d ^= b
        b ^= c
        a ^= d
        c ^= shifted
        d = _rotated(d, 11)


def next_int(numbers: Iterator[int], below: int) -> int:
    """A number from 0 to ``below`` - 1, each as likely: values that would favour small ones are drawn again."""
    biased = (2**32 - below) % below
    return next(number for _ in count() if (number := next(numbers)) >= biased) % below


def _rotated(number: int, bits: int) -> int:
    return (number << bits | number >> 32 - bits) & _MASK


def _rows(steps: Tensor, heavy: dict[int, list[int]]) -> Tensor:
    """The normalised rows of consecutive steps: (q, W) float32, W the last step."""
    steps = steps.unsqueeze(-1)  # (q, 1)
    positions = torch.arange(int(steps[-1]))  # (W,)
    past = positions < steps  # (q, W)

    sinks = torch.zeros(len(positions), dtype=torch.float64)
    sinks[: len(SINK_WEIGHTS)] = torch.tensor(SINK_WEIGHTS, dtype=torch.float64)[: len(positions)]
    weights = sinks * past  # (q, W)
    few = steps[:, 0] < len(SINK_WEIGHTS)
    weights[few] *= SINK_MASS / weights[few].sum(-1, keepdim=True)

    near = (LOCAL + 1 - (steps - positions)).to(torch.float64)  # (q, W)
    near.masked_fill_(~past | (near < 1), 0.0)
    mass = torch.where(steps < HEAVY_FROM, LOCAL_MASS + HEAVY_MASS, torch.tensor(LOCAL_MASS, dtype=torch.float64))
    weights += mass * near / near.sum(-1, keepdim=True)

    ranks = 1 / torch.arange(1, HEAVY + 1, dtype=torch.float64)
    shares = HEAVY_MASS * ranks / ranks.sum()
    for row, step in enumerate(steps[:, 0].tolist()):
        if step >= HEAVY_FROM:
            weights[row, heavy[max(HEAVY_FROM, step // REDRAW * REDRAW)]] += shares

    weights += NOISE_MASS / steps.double()
    weights.masked_fill_(~past, 0.0)
    return (weights / weights.cumsum(-1)[:, -1:]).float()  # cumsum adds from the first position on
