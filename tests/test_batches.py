"""Rows of a batch never meet: padding, other rows, beams, other caches and other threads leave a row as it is alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from helpers import (
    BLOCKS,
    BUDGET,
    LENGTHS,
    NOISE,
    PROMPT,
    alone_and_padded,
    batch,
    blocks_of,
    by_position,
    every_implementation,
    every_policy,
    forward,
    generate,
    kept,
    loop,
    plain,
    ragged_mask,
    small,
    text,
    tiny,
)

from kvevict import EvictingCache, host
from kvevict.policies import PyramidKV

# -- padding -------------------------------------------------------------------------------------------------------


def _assert_rows_are_alone(policy, budget, implementation, lengths=LENGTHS, sizes=BLOCKS) -> None:
    """A left-padded batch against each of its rows alone."""
    _assert_masked_rows_are_alone(policy, budget, implementation, ragged_mask(sum(sizes), lengths), sizes)


def _assert_masked_rows_are_alone(policy, budget, implementation, mask, sizes) -> None:
    """Pads anywhere: each row against its real tokens fed alone, in logits, kept tokens and the policy's columns."""
    ids = text(len(mask), sum(sizes))
    model = tiny(implementation)
    together = EvictingCache(model, policy, budget=budget)
    alone = [EvictingCache(model, policy, budget=budget) for _ in mask]
    done = 0
    for block in blocks_of(ids, sizes):
        start, done = done, done + block.shape[1]
        logits = forward(model, together, block, mask[:, :done], positions=True)
        for row, own_mask in enumerate(mask[:, start:done].bool()):
            if own_mask.any():
                own = forward(model, alone[row], block[row : row + 1, own_mask], positions=True)
                assert (logits[row, own_mask] - own[0]).abs().max() < NOISE
            for layer, (positions, expected) in enumerate(zip(kept(together), kept(alone[row]), strict=True)):
                if not expected.numel():  # nothing but pads so far
                    assert (positions[row] == -1).all()
                    continue
                width = expected.shape[-1]
                assert torch.equal(positions[row, :, :width], expected[0])
                assert (positions[row, :, width:] == -1).all()
                columns = by_position(together)[layer]
                for column, values in by_position(alone[row])[layer].items():
                    torch.testing.assert_close(columns[column][row, :, :width], values[0], rtol=1e-4, atol=NOISE)


@every_policy
@every_implementation
@pytest.mark.parametrize("budget", [BUDGET, 0.5, 64])
def test_a_padded_row_equals_the_row_alone(name, implementation, budget):
    _assert_rows_are_alone(small(name), budget, implementation)


@every_policy
@every_implementation
@pytest.mark.parametrize(
    ("options", "budget"),
    [({"sinks": 3, "recent": 2}, BUDGET), ({"protect_prompt": 0.5, "recent": 1}, 12)],
    ids=["sinks-and-recent", "half-prompt"],
)
def test_protection_of_a_padded_row_is_the_rows_own(name, implementation, options, budget):
    _assert_rows_are_alone(small(name, **options), budget, implementation)


@every_policy
@pytest.mark.parametrize("budget", [BUDGET, 0.5])
def test_rows_whose_tokens_go_several_at_once_are_the_rows_alone(name, budget):
    """Such rows are cut each for itself; with `full` none is."""
    _assert_rows_are_alone(small(name, evict_every=3), budget, "sdpa")


@every_policy
def test_a_row_of_one_token_shares_a_batch_with_long_rows(name):
    _assert_rows_are_alone(small(name), BUDGET, "sdpa", lengths=(1, 20, 9), sizes=(20, 1, 1, 4, 1, 1))


@every_policy
def test_rows_that_outgrow_the_budget_at_different_times_are_cut_at_their_own(name):
    _assert_rows_are_alone(small(name), BUDGET, "sdpa", lengths=(20, 10, 5, 3), sizes=(20, 1, 1, 1, 6, 1, 1))


@every_policy
@every_implementation
def test_padding_may_reach_over_several_chunks_of_the_prompt(name, implementation):
    """Rows whose first chunks are nothing but pads: what a chunk holds is still the row's own."""
    model = tiny(implementation)
    ids, mask = text(2, 24), ragged_mask(24, (20, 7))
    sizes = [6, 6, 8, 1, 1, 2]
    cache, long = (EvictingCache(model, small(name), budget=BUDGET) for _ in range(2))
    padded = loop(model, cache, blocks_of(ids, sizes), mask, positions=True)
    alone = loop(model, long, blocks_of(ids[:1], sizes), positions=True)
    for one, other in zip(padded, alone, strict=True):
        assert (one[:1] - other).abs().max() < NOISE
    for positions, expected in zip(kept(cache), kept(long), strict=True):
        assert torch.equal(positions[0, :, : expected.shape[-1]], expected[0])
        assert (positions[1] < 7 + 4).all() and bool((positions[1] >= 0).any())
    assert torch.isfinite(torch.cat([one[1, -1] for one in padded[2:]])).all()


@every_policy
@every_implementation
@pytest.mark.parametrize("seed", range(3))
def test_pads_anywhere_are_never_kept_scored_or_attended(name, implementation, seed):
    """Left and right padding, rows that pause for whole forwards, pads between tokens."""
    sizes = [8, 4, 1, 1, 6, 1, 1, 5, 1, 1, 1, 1]
    mask = (torch.rand(4, sum(sizes), generator=torch.Generator().manual_seed(seed)) < 0.6).long()
    mask[0] = 1
    mask[1, 12:22] = 0
    mask[2, :9] = 0
    mask[3, -5:] = 0
    _assert_masked_rows_are_alone(small(name), BUDGET, implementation, mask, sizes)


@every_policy
@pytest.mark.parametrize("seed", range(2))
def test_pads_just_before_the_newest_tokens_hide_no_query(name, seed):
    """A right-padded prompt fed together with what follows it."""
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 16 + seed : 18 + seed] = 0
    _assert_masked_rows_are_alone(small(name), BUDGET, "sdpa", mask, [20, 1, 1, 1, 1])


@pytest.mark.parametrize("budget", [BUDGET, 0.4])
@every_implementation
def test_a_paused_row_of_a_pyramid_keeps_what_it_held(budget, implementation):
    """While one row goes on, the other, shorter than an average budget, must lose nothing in any layer."""
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 8:24] = 0
    policy = PyramidKV(window=2, kernel=1)
    _assert_masked_rows_are_alone(policy, budget, implementation, mask, [8, *([1] * 12), 4, *([1] * 6)])


@pytest.mark.parametrize("rounding", ["exact", "authors"])
@every_implementation
def test_a_padded_pyramid_gives_each_row_the_budgets_of_the_row_alone(rounding, implementation):
    _assert_rows_are_alone(PyramidKV(window=3, kernel=3, rounding=rounding), BUDGET, implementation)


@every_policy
@every_implementation
def test_generated_rows_equal_the_rows_generated_alone(name, implementation):
    model = tiny(implementation)
    ids, mask = batch(True, PROMPT)
    ids = ids * mask  # every token once, as in text(): neither prompt nor pads may be generated again
    once = {"no_repeat_ngram_size": 1, "suppress_tokens": [0]}
    cache = EvictingCache(model, small(name), budget=BUDGET)
    together = generate(model, ids, cache, mask, **once)
    for row, length in enumerate(LENGTHS):
        own = EvictingCache(model, small(name), budget=BUDGET)
        prompt = ids[row : row + 1, PROMPT - length :]
        alone = generate(model, prompt, own, torch.ones_like(prompt), **once)
        assert torch.equal(together.sequences[row, PROMPT:], alone.sequences[0, length:])
        for one, other in zip(together.logits, alone.logits, strict=True):
            assert (one[row] - other[0]).abs().max() < NOISE
        for positions, expected in zip(kept(cache), kept(own), strict=True):
            assert torch.equal(positions[row, :, : expected.shape[-1]], expected[0])


@every_implementation
@pytest.mark.parametrize("name", ["h2o", "random"])
@pytest.mark.parametrize("hidden", [False, -1e4, -1e9, -3e38])
def test_a_four_dimensional_mask_hides_what_a_two_dimensional_one_hides(name, implementation, hidden):
    ids, mask = batch(True)
    model = tiny(implementation)
    expected = EvictingCache(model, name, budget=BUDGET)
    logits = loop(model, expected, blocks_of(ids), mask, positions=True)
    cache = EvictingCache(model, name, budget=BUDGET)
    done = 0
    for index, block in enumerate(blocks_of(ids)):
        start, done = done, done + block.shape[1]
        shown = torch.ones(block.shape[1], done, dtype=torch.bool).tril(start) & mask[:, None, None, :done].bool()
        four = shown if hidden is False else torch.zeros(shown.shape).masked_fill(~shown, hidden)
        positions = (mask[:, :done].cumsum(1) - 1).clamp_min(0)[:, -block.shape[1] :]
        with torch.no_grad():
            named = {host.cache_argument(model): cache}
            got = model(block, attention_mask=four, position_ids=positions, **named).logits
        real = mask[:, start:done].bool()
        assert (got - logits[index])[real].abs().max() < NOISE
    assert all(torch.equal(one, other) for one, other in zip(kept(cache), kept(expected), strict=True))


# -- moving rows ---------------------------------------------------------------------------------------------------


@every_policy
@every_implementation
@pytest.mark.parametrize("padded", [False, True], ids=["even", "ragged"])
def test_reordered_rows_are_the_rows_that_were_there(name, implementation, padded):
    """Like a beam search: after a reorder each row continues as if it had been fed its new past from the start."""
    model = tiny(implementation)
    ids, mask = text(3), ragged_mask() if padded else torch.ones(3, sum(BLOCKS), dtype=torch.long)
    before, after = [20, 1, 1, 4], [1, 1, 3, 1]
    order = torch.tensor([2, 0, 0])
    cut = sum(before)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, cache, blocks_of(ids[:, :cut], before), mask, positions=True)
    cache.reorder_cache(order)
    past = torch.cat([ids[order, :cut], ids[:, cut : cut + sum(after)]], 1)
    moved = mask[order]
    straight = EvictingCache(model, small(name), budget=BUDGET)
    expected = loop(model, straight, blocks_of(past, before + after), moved, positions=True)[len(before) :]
    done = cut
    for block, one in zip(blocks_of(past[:, cut:], after), expected, strict=True):
        done += block.shape[1]
        got = forward(model, cache, block, moved[:, :done], positions=True)
        assert (got - one).abs().max() < NOISE
    for one, other in zip(kept(cache), kept(straight), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(by_position(cache), by_position(straight), strict=True):
        for column in other:
            torch.testing.assert_close(one[column], other[column], rtol=1e-4, atol=NOISE)


@every_policy
@pytest.mark.parametrize("padded", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("move", ["select", "repeat"])
def test_selected_and_repeated_rows_take_everything_along(name, padded, move):
    model = tiny()
    ids, mask = text(3), ragged_mask() if padded else torch.ones(3, sum(BLOCKS), dtype=torch.long)
    before, after = [20, 1, 1, 4, 1], [1, 3, 1]
    cut = sum(before)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, cache, blocks_of(ids[:, :cut], before), mask, positions=True)
    rows = torch.tensor([2, 1]) if move == "select" else torch.tensor([0, 0, 1, 1, 2, 2])
    if move == "select":
        cache.batch_select_indices(rows)
    else:
        cache.batch_repeat_interleave(2)
    straight = EvictingCache(model, small(name), budget=BUDGET)
    future = text(len(rows), sum(after), seed=9)
    past = torch.cat([ids[rows, :cut], future], 1)
    expected = loop(model, straight, blocks_of(past, before + after), mask[rows], positions=True)[len(before) :]
    done = cut
    for block, one in zip(blocks_of(future, after), expected, strict=True):
        done += block.shape[1]
        got = forward(model, cache, block, mask[rows][:, :done], positions=True)
        assert (got - one).abs().max() < NOISE
    for one, other in zip(kept(cache), kept(straight), strict=True):
        width = min(one.shape[-1], other.shape[-1])
        assert torch.equal(one[..., :width], other[..., :width])


@every_policy
@every_implementation
def test_beam_search_with_room_finds_the_full_caches_beams(name, implementation):
    model = tiny(implementation)
    ids = text(2, PROMPT)
    options = {"num_beams": 3, "num_return_sequences": 2, "new": 6}
    full = generate(model, ids, plain(model), torch.ones_like(ids), **options).sequences
    roomy = EvictingCache(model, small(name), budget=64)
    assert torch.equal(generate(model, ids, roomy, torch.ones_like(ids), **options).sequences, full)
    tight = EvictingCache(model, small(name), budget=BUDGET)
    found = generate(model, ids, tight, torch.ones_like(ids), **options).sequences
    assert found.shape == full.shape
    assert tight.get_seq_length() == PROMPT + 5
    assert kept(tight)[0].shape[0] == 6


# -- one model, several caches -------------------------------------------------------------------------------------


@every_policy
@every_implementation
def test_two_caches_interleaved_on_one_model_do_not_meet(name, implementation):
    model = tiny(implementation)
    texts = [text(seed=1), text(seed=2)]
    policies = [small(name), small("h2o" if name != "h2o" else "random")]
    alone = [
        loop(model, EvictingCache(model, policy, budget=BUDGET), blocks_of(ids))
        for ids, policy in zip(texts, policies, strict=True)
    ]
    full = loop(model, plain(model), blocks_of(texts[0]))
    caches = [EvictingCache(model, policy, budget=BUDGET) for policy in policies]
    keeper = plain(model)
    for step, pair in enumerate(zip(*(blocks_of(ids) for ids in texts), strict=True)):
        for which in (0, 1):
            assert torch.equal(forward(model, caches[which], pair[which]), alone[which][step])
        assert torch.equal(forward(model, keeper, pair[0]), full[step])


@every_implementation
def test_threads_with_different_policies_share_a_model(implementation):
    model = tiny(implementation)
    names = ["h2o", "streaming_llm", "tova", "full"]
    ids = [text(seed=seed) for seed in range(len(names))]
    expected = [
        loop(model, EvictingCache(model, small(name), budget=BUDGET), blocks_of(each))
        for name, each in zip(names, ids, strict=True)
    ]
    got: list[list[torch.Tensor] | BaseException] = [[] for _ in names]
    start = threading.Barrier(len(names))

    def work(index: int) -> None:
        try:
            start.wait()
            for _ in range(3):
                cache = EvictingCache(model, small(names[index]), budget=BUDGET)
                got[index] = loop(model, cache, blocks_of(ids[index]))
        except BaseException as error:  # a thread's error would be lost
            got[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(got, expected, strict=True):
        assert not isinstance(one, BaseException), one
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@every_policy
@every_implementation
@alone_and_padded
def test_after_reset_a_cache_is_as_new(name, implementation, padded):
    model = tiny(implementation)
    ids, mask = batch(padded)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    fresh = loop(model, cache, blocks_of(ids), mask, positions=True)
    held = kept(cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, max(cache.stored)) == (0, 0, 0)
    loop(model, cache, blocks_of(text(2, seed=7)))  # another batch size and text in between
    cache.reset()
    again = loop(model, cache, blocks_of(ids), mask, positions=True)
    for one, other in zip(fresh, again, strict=True):
        assert torch.equal(one, other) or bool(one.isnan().any())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert all(torch.equal(one, other) for one, other in zip(held, kept(cache), strict=True))


@every_policy
@every_implementation
@alone_and_padded
def test_a_deep_copy_continues_like_the_original_and_apart_from_it(name, implementation, padded):
    model = tiny(implementation)
    ids, mask = batch(padded)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    blocks = blocks_of(ids)
    loop(model, cache, blocks[:4], mask, positions=True)
    twin = copy.deepcopy(cache)
    held = [positions.clone() for positions in kept(twin)]
    first = [forward(model, cache, b, None if mask is None else mask[:, : 23 + d], True)
             for b, d in zip(blocks[4:7], (6, 7, 8), strict=True)]  # fmt: skip  # one thought
    assert all(torch.equal(one, other) for one, other in zip(held, kept(twin), strict=True))
    second = [forward(model, twin, b, None if mask is None else mask[:, : 23 + d], True)
              for b, d in zip(blocks[4:7], (6, 7, 8), strict=True)]  # fmt: skip  # as above
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(kept(cache), kept(twin), strict=True))
