"""Quantised storage: what is kept in few bits, beside a slow twin that rounds plain numbers at the same times."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from helpers import (
    BUDGET,
    KV_HEADS,
    LAYERS,
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
    largest_error,
    loop,
    small,
    text,
    tiny,
)
from torch import Tensor
from transformers import QuantizedCache
from transformers.cache_utils import QuantizedLayer

from kvevict import EvictingCache, KvevictError, OptionError, Quantized, UnsupportedOperationError, host
from kvevict.errors import MissingPackageError
from kvevict.layer import EvictingLayer

quanto = pytest.importorskip("optimum.quanto", reason="needs the package optimum-quanto: pip install 'kvevict[quanto]'")

HEAD, RESIDUAL = 16, 5
HOW = Quantized(q_group_size=8, residual_length=RESIDUAL)
NEWER = hasattr(QuantizedLayer, "_apply_pending_reorder")
"""Older releases of transformers count a turn of several tokens as one, and leave packed rows where they were."""
every_width = pytest.mark.parametrize("nbits", [2, 4])


def _how(nbits: int) -> Quantized:
    return Quantized(nbits=nbits, q_group_size=8, residual_length=RESIDUAL)


def _theirs(model: Any, how: Quantized = HOW) -> QuantizedCache:
    return QuantizedCache(how.backend, model.config, how.nbits, 0, 0, how.q_group_size, how.residual_length)


def _rounded(numbers: Tensor, how: Quantized) -> Tensor:
    """Every group of a head moved to the nearest of 2**nbits steps between its smallest and its largest number."""
    groups = numbers.unflatten(-1, (-1, how.q_group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / (2**how.nbits - 1)
    return (((groups - low) / step).round() * step + low).flatten(-2)


class Twin(EvictingLayer):
    """Plain numbers in plain slots, rounded when a quantised layer packs them."""

    how = HOW
    rounded_at = 0
    stays_put = False

    def settle(self, rescore: Any = None) -> None:
        super().settle(rescore)
        if not self.rounded_at or self.seen - self.rounded_at >= self.how.residual_length:
            self.keys, self.values = _rounded(self.keys, self.how), _rounded(self.values, self.how)
            self.rounded_at = self.seen


def _twin(model: Any, policy: Any, budget: float, how: Quantized = HOW) -> EvictingCache:
    cache = EvictingCache(model, policy, budget=budget)
    for index, layer in enumerate(cache.layers):
        cache.layers[index] = Twin(layer.spec, layer.index)
        cache.layers[index].how = how
    return cache


def _assert_same(one: EvictingCache, other: EvictingCache) -> None:
    assert all(torch.equal(*pair) for pair in zip(kept(one), kept(other), strict=True))
    for left, right in zip(by_position(one), by_position(other), strict=True):
        for column, values in left.items():
            torch.testing.assert_close(values, right[column], rtol=1e-4, atol=NOISE)


# -- what it holds -------------------------------------------------------------------------------------------------


@every_policy
@every_implementation
@alone_and_padded
def test_a_policy_over_packed_tokens_equals_its_twin_over_rounded_ones(name, implementation, padded):
    model = tiny(implementation)
    ids, mask = batch(padded)
    caches = [
        EvictingCache(model, small(name), budget=BUDGET, storage=HOW),
        _twin(model, small(name), BUDGET),
        EvictingCache(model, small(name), budget=BUDGET),
    ]
    packed, twin, plain = (loop(model, cache, blocks_of(ids), mask, positions=True) for cache in caches)
    assert largest_error(packed, twin, blocks_of(ids), mask) < 5 * NOISE
    assert largest_error(packed, plain, blocks_of(ids), mask) > 1000 * NOISE  # rounding is seen
    _assert_same(*caches[:2])


@every_width
@pytest.mark.parametrize("budget", [0.4, BUDGET])
@pytest.mark.parametrize("residual", [1, 3, 100])
def test_whatever_is_rounded_when(nbits, budget, residual):
    model, how = tiny(), Quantized(nbits=nbits, q_group_size=16, residual_length=residual)
    blocks = blocks_of(text(length=60), [3, 1, 1, 2, 1, 13, 1, 1, 1, 1, 4] + [1] * 31)
    caches = [EvictingCache(model, "h2o", budget=budget, storage=how), _twin(model, "h2o", budget, how)]
    packed, twin = (loop(model, cache, blocks) for cache in caches)
    assert largest_error(packed, twin, blocks) < 5 * NOISE
    _assert_same(*caches)


@every_policy
@every_implementation
@every_width
def test_with_room_it_is_identical_to_transformers_quantised_cache(name, implementation, nbits):
    model, how = tiny(implementation), _how(nbits)
    blocks = blocks_of(text()) if NEWER else [text(length=PROMPT), *text(length=12, seed=2).split(1, 1)]
    cache = EvictingCache(model, small(name), budget=64, storage=how)
    got, expected = loop(model, cache, blocks), loop(model, _theirs(model, how), blocks)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prefill_chunk_size": 6}], ids=["greedy", "beams", "chunks"])
def test_with_room_it_generates_what_transformers_quantised_cache_generates(how):
    if how and not NEWER:
        pytest.skip("older releases of transformers reorder only the newest tokens, and pack chunks at other times")
    model, ids = tiny(), text(length=PROMPT)
    cache = EvictingCache(model, "h2o", budget=64, storage=HOW)
    got = generate(model, ids, cache, new=12, return_dict_in_generate=False, **how)
    assert torch.equal(got, generate(model, ids, _theirs(model), new=12, return_dict_in_generate=False, **how))


# -- what it costs -------------------------------------------------------------------------------------------------


def test_bytes_fall_by_what_is_packed():
    model = tiny(dtype=torch.bfloat16, hidden_size=256)  # heads of 64 numbers
    ids, budget, head = text(length=400), 128, 64
    blocks = [ids[:, :300], *ids[:, 300:].split(1, 1)]
    held = {}
    for bits, storage in {
        16: None,
        4: Quantized(residual_length=16),
        2: Quantized(nbits=2, residual_length=16),
    }.items():
        cache = EvictingCache(model, "streaming_llm", budget=budget, storage=storage)
        loop(model, cache, blocks)
        assert cache.stored == [budget] * LAYERS
        held[bits] = cache.nbytes
        newest = (100 % 16) if storage else 0
        numbers = 2 * LAYERS * KV_HEADS * head * (budget * bits // 8 + newest * 2)  # keys and values alone
        scales = 2 * LAYERS * KV_HEADS * budget * 2 * 2 if storage else 0
        books = LAYERS * KV_HEADS * (budget + newest) * 3 * 8  # positions: of slots, packed and newest
        assert numbers + scales <= cache.nbytes <= numbers + scales + books + 2 * LAYERS * KV_HEADS * head * 2 + 200
    assert held[4] < 0.45 * held[16]
    assert held[2] < 0.7 * held[4]


def test_tokens_are_packed_once_per_residual_length(monkeypatch):
    model, calls = tiny(), []
    original = quanto.quantize_weight
    monkeypatch.setattr(quanto, "quantize_weight", lambda *a, **k: calls.append(1) or original(*a, **k))
    cache = EvictingCache(model, "h2o", budget=BUDGET, storage=HOW)
    loop(model, cache, [text(length=PROMPT), *text(length=4 * RESIDUAL, seed=3).split(1, 1)])
    assert len(calls) == 2 * LAYERS * (1 + 4)


def test_between_forwards_no_plain_copy_is_held():
    model = tiny()
    cache = EvictingCache(model, "adaptive_ema", budget=BUDGET, storage=HOW)  # all layers wait for the last one
    loop(model, cache, blocks_of(text()))
    assert all(layer.keys.numel() == layer.values.numel() == 0 for layer in cache.evicting_layers)
    cache.reset()
    assert cache.nbytes == 0 and cache.get_seq_length() == 0
    assert largest_error(*(loop(model, each, blocks_of(text())) for each in
                           (cache, EvictingCache(model, "adaptive_ema", budget=BUDGET, storage=HOW))),
                         blocks_of(text())) == 0  # fmt: skip  # one claim


# -- what generate() and its users do with it ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2o", "snapkv", "random"])
@pytest.mark.parametrize("steps", [0, 3], ids=["just-packed", "newest-too"])
def test_rows_move_with_all_that_is_packed(name, steps):
    model, ids = tiny(), text(3, PROMPT + 20)
    cache = EvictingCache(model, small(name), budget=BUDGET, storage=HOW)
    alone = [EvictingCache(model, small(name), budget=BUDGET, storage=HOW) for _ in range(3)]
    first = [PROMPT] + [1] * steps
    done = sum(first)
    loop(model, cache, blocks_of(ids[:, :done], first))
    for row, one in enumerate(alone):
        loop(model, one, blocks_of(ids[row : row + 1, :done], first))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 4]))  # rows 2, 0 and 0 of the first batch
    rows = [copy.deepcopy(alone[row]) for row in (2, 0, 0)]
    for token in ids[:, done:].split(1, 1):
        logits = forward(model, cache, token)
        for row, one in enumerate(rows):
            assert (forward(model, one, token[row : row + 1])[0] - logits[row]).abs().max() < NOISE
    for row, one in enumerate(rows):
        assert all(torch.equal(a[row], b[0]) for a, b in zip(kept(cache), kept(one), strict=True))


@alone_and_padded
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "file"])
def test_copies_go_on_as_the_original_does(how, padded, tmp_path):
    model = tiny()
    ids, mask = batch(padded)
    cache = EvictingCache(model, "h2o", budget=BUDGET, storage=HOW)
    prompt = None if mask is None else mask[:, :PROMPT]
    forward(model, cache, ids[:, :PROMPT], prompt)
    for token in range(PROMPT, PROMPT + 3):
        forward(model, cache, ids[:, token : token + 1], None if mask is None else mask[:, : token + 1])
    if how == "deepcopy":
        other = copy.deepcopy(cache)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(cache)).attach(model)
    else:
        cache.save(tmp_path)
        other = EvictingCache.load(model, tmp_path)
    assert other.storage == HOW
    for token in range(PROMPT + 3, ids.shape[1]):
        seen = None if mask is None else mask[:, : token + 1]
        assert torch.equal(*(forward(model, each, ids[:, token : token + 1], seen) for each in (cache, other)))
    _assert_same(cache, other)


def test_a_second_turn_and_inference_mode_feed_only_what_is_new():
    model, ids = tiny(), text(length=PROMPT)
    cache, again = (EvictingCache(model, "tova", budget=BUDGET, storage=HOW) for _ in range(2))
    with torch.inference_mode():
        out = generate(model, ids, cache, return_dict_in_generate=False)
    assert torch.equal(out, generate(model, ids, again, return_dict_in_generate=False))
    turn = torch.cat([out, text(length=4, seed=7)], 1)
    assert torch.equal(generate(model, turn, cache).sequences, generate(model, turn, again).sequences)
    assert cache.stored == [BUDGET] * LAYERS and cache.get_seq_length() == PROMPT + 8 + 4 + 7


def test_the_gradient_reaches_the_newest_forward_and_no_further():
    model = tiny()
    cache = EvictingCache(model, "h2o", budget=BUDGET, storage=HOW)
    forward(model, cache, text(length=PROMPT))
    named = {host.cache_argument(model): cache}
    model(text(length=3, seed=4), **named).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(t.requires_grad for layer in cache.evicting_layers for t in layer.tensors())


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "hqq"}, "backend='hqq'.*'quanto'"),
        ({"nbits": 8}, "nbits=8.*2 or 4"),
        ({"axis_key": -1}, "axis_key=-1.*expected 0"),
        ({"axis_value": 1}, "axis_value=1.*expected 0"),
        ({"q_group_size": 0}, "q_group_size=0.*1 or more"),
        ({"residual_length": True}, "residual_length=True.*1 or more"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_bad_options_are_refused_where_they_are_given(options, message):
    with pytest.raises(OptionError, match=message):
        Quantized(**options)


@pytest.mark.parametrize("storage", ["quanto3", 4, {"nbits": 4}, True])
def test_an_unknown_storage_is_refused(storage):
    with pytest.raises(OptionError, match=r"storage=.*'quanto4', 'quanto2', or kvevict\.Quantized"):
        EvictingCache(tiny(), "h2o", budget=BUDGET, storage=storage)


def test_groups_must_divide_heads():
    with pytest.raises(OptionError, match=r"q_group_size=64.*heads have 16 numbers"):
        EvictingCache(tiny(), "h2o", budget=BUDGET, storage="quanto4")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optimum.quanto", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'kvevict\[quanto\]'"):
        EvictingCache(tiny(), "h2o", budget=BUDGET, storage=HOW)


def test_drafts_are_refused_before_anything_is_fed():
    model = tiny()
    cache = EvictingCache(model, "h2o", budget=BUDGET, storage=HOW)
    with pytest.raises((UnsupportedOperationError, ValueError)):
        generate(model, text(length=6).repeat(1, 4), cache, prompt_lookup_num_tokens=3)
    assert cache.get_seq_length() == 0
    with pytest.raises(UnsupportedOperationError, match="quantised storage"):
        cache.activate_past_recording()
    forward(model, cache, text(length=PROMPT))
    with pytest.raises(KvevictError, match=r"crop\(-1\)"):
        cache.crop(-1)
    assert cache.get_seq_length() == PROMPT
