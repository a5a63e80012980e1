"""The synthetic traces: the published one to the bit, the patterns as documented, and names that do not exist."""

from __future__ import annotations

import functools

import pytest
import torch

from kvevict.errors import KvevictError, TraceError
from kvevict.lab.decode import decode_rows, heavy_positions, next_int, xoshiro128
from kvevict.lab.patterns import EARLY, HEADS, LATE, PATTERNS
from kvevict.lab.traces import decode_trace, named_trace

FIRST_STEPS = [
    [1065353216],
    [1057091522, 1056710779],
    [1051789414, 1051372203, 1050954991],
    [1049169913, 1048773971, 1048180058, 1047388173],
    [1046887454, 1046054006, 1045220557, 1044387108, 1043553659],
]
FNV_OF_ALL_STEPS = 3136039440


def rows(seed: int, length: int) -> list[torch.Tensor]:
    """The weights of each step, without the zeros after them."""
    return [block[i, : start + i] for start, block in decode_rows(seed, length) for i in range(len(block))]


def slow_row(t: int, heavy: list[int]) -> list[float]:
    """One step in plain Python, as the definition says it, added up in the definition's order."""
    sinks = [0.06, 0.045, 0.03, 0.015][:t]
    scale = 0.15 / sum(sinks) if t < 4 else 1.0
    row = [0.0] * t
    for position, weight in enumerate(sinks):
        row[position] += weight * scale
    near = range(1, min(64, t) + 1)
    for offset in near:
        row[t - offset] += (0.8 if t < 128 else 0.55) * (65 - offset) / sum(65 - d for d in near)
    harmonic = sum(1 / k for k in range(1, 33))
    for rank, position in enumerate(heavy if t >= 128 else [], 1):
        row[position] += 0.25 / rank / harmonic
    total = sum(weight + 0.05 / t for weight in row)
    return [(weight + 0.05 / t) / total for weight in row]


def test_the_first_steps_have_the_published_bits():
    assert [row.view(torch.int32).tolist() for row in rows(7, 6)] == FIRST_STEPS


def test_all_steps_have_the_published_checksum():
    table = b"".join(row.numpy().tobytes() for row in rows(7, 4096))
    assert len(table) == 4 * 4096 * 4095 // 2
    checksum = functools.reduce(lambda h, byte: (h ^ byte) * 16777619 & 0xFFFFFFFF, table, 2166136261)
    assert checksum == FNV_OF_ALL_STEPS


@pytest.mark.parametrize("seed", [7, 1, 123456])
def test_steps_are_what_the_definition_says(seed):
    drawn = heavy_positions(seed, 1100)
    made = rows(seed, 1100)
    for t in [1, 3, 4, 5, 64, 65, 127, 128, 129, 511, 512, 1023, 1024, 1099]:
        heavy = drawn[max((step for step in drawn if step <= t), default=128)]
        assert made[t - 1].tolist() == pytest.approx(slow_row(t, heavy), rel=1e-6)


def test_a_trace_is_the_beginning_of_a_longer_one():
    assert all(map(torch.equal, rows(7, 300), rows(7, 700)))


def test_heavy_hitters_are_distinct_old_enough_and_drawn_again_every_512_steps():
    drawn = heavy_positions(5, 2000)
    assert list(drawn) == [128, 512, 1024, 1536]
    for step, positions in drawn.items():
        assert len(set(positions)) == 32
        assert min(positions) >= 4
        assert max(positions) < step - 64


def test_random_numbers_are_uniform_and_rejection_draws_again():
    numbers = xoshiro128(7)
    counts = torch.bincount(torch.tensor([next_int(numbers, 10) for _ in range(10000)]), minlength=10)
    assert counts.min() > 900 and counts.max() < 1100
    below = 2**31 + 1  # almost half of the values are rejected
    assert next_int(iter([0, 2**31 - 2, 2**31 - 1]), below) == 2**31 - 1


def test_seeds_are_runs_side_by_side():
    together = list(decode_trace(300, [3, 4]).blocks())
    for run, seed in enumerate([3, 4]):
        alone = list(decode_trace(300, [seed]).blocks())
        assert all(torch.equal(a.weights[run], b.weights[0]) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_rows_sum_to_one_and_look_back_only(name):
    trace = named_trace(name, length=60, seeds=[3, 100])
    (block,) = trace.blocks()
    assert block.weights.shape == (2, 1, HEADS, 60, 60)
    torch.testing.assert_close(block.weights.sum(-1), torch.ones(2, 1, HEADS, 60, dtype=torch.float64))
    assert not block.weights.triu(1).any()
    assert not torch.equal(block.weights[0], block.weights[1])


@pytest.mark.parametrize(("name", "heavy"), [("heavy-early", EARLY), ("heavy-late", LATE)])
def test_heavy_patterns_put_half_of_the_mass_on_their_positions(name, heavy):
    (block,) = named_trace(name).blocks()
    share = block.weights[0, 0, :, 100:, list(heavy)].sum(-1).mean()
    assert 0.45 < share < 0.6


def test_the_oscillating_pattern_switches():
    (block,) = named_trace("oscillating").blocks()
    share = block.weights[0, 0, :, :, list(EARLY)].sum(-1).mean(0)  # (q,)
    assert share[100:120].min() > 0.4
    assert share[120:140].max() < 0.01


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("decode4096", "did you mean 'decode-4096'"),
        ("heavy_early", "did you mean 'heavy-early'"),
        ("nothing-like-it", "any decode-N"),
    ],
)
def test_an_unknown_trace_is_answered_with_near_names(name, said):
    with pytest.raises(TraceError, match=said):
        named_trace(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 1}, "at least 2 tokens"),
        ({"seeds": [-1]}, "seed=-1"),
        ({"seeds": [2**32]}, "seed=4294967296"),
        ({"seeds": [1, 1]}, "each once"),
    ],
)
def test_bad_lengths_and_seeds_are_refused(options, said):
    with pytest.raises(TraceError, match=said) as caught:
        named_trace("decode-4096", **options)
    assert isinstance(caught.value, KvevictError) and isinstance(caught.value, ValueError)
