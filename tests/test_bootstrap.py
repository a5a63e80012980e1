"""Paired bootstrap intervals: what is drawn, what they cover, and what counts as a tie."""

from __future__ import annotations

import math

import pytest
import torch

from kvevict import OptionError
from kvevict.bootstrap import BLOCK, paired_bootstrap, units_of


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_constant_difference_has_an_interval_of_no_width():
    a = noise(1000)
    interval = paired_bootstrap([a + 0.5], [a])
    assert interval.low == pytest.approx(0.5) and interval.high == pytest.approx(0.5)
    assert not interval.tie


def test_the_same_values_are_a_tie():
    a = noise(1000)
    assert paired_bootstrap([a], [a.clone()]).tie


def test_pairing_finds_a_difference_that_two_means_would_hide():
    a = 10 * noise(1280)  # the mean of 20 blocks is uncertain by 0.3
    b = a + 0.05 + 0.02 * noise(1280, seed=1)
    interval = paired_bootstrap([b], [a])
    assert 0.04 < interval.low < interval.difference < interval.high < 0.06
    assert not interval.tie
    shuffled = a[torch.randperm(1280, generator=torch.Generator().manual_seed(0))]
    assert paired_bootstrap([b], [shuffled]).tie


def test_swapping_the_two_turns_the_sign():
    a, b = noise(640), noise(640, seed=1)
    one, other = paired_bootstrap([a], [b]), paired_bootstrap([b], [a])
    assert (one.difference, one.low, one.high) == pytest.approx((-other.difference, -other.high, -other.low))


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    covered = 0
    for trial in range(300):
        values = 1 + noise(20, 5, seed=trial)
        interval = paired_bootstrap(list(values), list(torch.zeros(20, 5)), resamples=400)
        covered += interval.low <= 1 <= interval.high
    assert 0.88 < covered / 300 < 0.98  # 95 % is asked for; 20 units make it somewhat less


def test_blocks_respect_that_neighbours_are_alike():
    steps = noise(64, seed=2).repeat_interleave(BLOCK)  # a value for each block, so 64 independent ones of 4,096
    interval = paired_bootstrap([steps], [torch.zeros_like(steps)])
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * steps.std().item() / 8, rel=0.2)


def test_units_are_documents_if_there_are_enough_and_blocks_otherwise():
    assert paired_bootstrap([noise(30)] * 10, [noise(30)] * 10).units == "10 documents"
    assert paired_bootstrap([noise(200)] * 9, [noise(200)] * 9).units == f"27 blocks of {BLOCK} tokens"


@pytest.mark.parametrize(("tokens", "sizes"), [(1, [1]), (64, [64]), (100, [100]), (128, [64, 64]), (190, [64, 126])])
def test_every_token_is_in_one_block(tokens, sizes):
    units, _ = units_of([torch.arange(tokens)])
    assert [len(unit) for unit in units] == sizes
    assert torch.cat(units).equal(torch.arange(tokens))


def test_long_documents_weigh_more_than_short_ones():
    ones, zeros = [torch.ones(100)] + [torch.zeros(1)] * 9, [torch.zeros(100)] + [torch.zeros(1)] * 9
    interval = paired_bootstrap(ones, zeros)
    assert interval.difference == pytest.approx(100 / 109)
    assert interval.low == 0 and interval.high > 300 / 308  # drawn three times, the long one is nearly all there is


def test_one_unit_says_nothing():
    interval = paired_bootstrap([torch.ones(10)], [torch.zeros(10)])
    assert interval.difference == 1 and math.isnan(interval.low) and interval.tie


def test_the_same_seed_gives_the_same_interval():
    a, b = noise(640), noise(640, seed=1)
    assert paired_bootstrap([a], [b], seed=3) == paired_bootstrap([a], [b], seed=3)
    assert paired_bootstrap([a], [b], seed=3) != paired_bootstrap([a], [b], seed=4)


def test_values_of_different_tokens_are_refused():
    with pytest.raises(OptionError, match="same tokens"):
        paired_bootstrap([noise(5)], [noise(6)])
    with pytest.raises(OptionError, match="no values"):
        paired_bootstrap([], [])
    with pytest.raises(OptionError, match="level=95"):
        paired_bootstrap([noise(5)], [noise(5)], level=95)
