"""What a cache costs: bytes that are really held, prompts that are really freed, and steps that add nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    BUDGET,
    KV_HEADS,
    OBSERVING,
    blocks_of,
    every_implementation,
    every_policy,
    forward,
    kept,
    loop,
    ragged_mask,
    small,
    text,
    tiny,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvevict import EvictingCache, host, observe, statistics
from kvevict.layer import EvictingLayer

HEAD = 16


def _reachable(thing: Any, known: set[int]) -> Iterator[Tensor]:
    """Every tensor that ``thing`` keeps alive through its own attributes and containers."""
    if id(thing) in known or isinstance(thing, (str, int, float, type, weakref.ref, torch.nn.Module)):
        return
    known.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        parts: list[Any] = [thing._base, *vars(thing).values()]
    elif isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        parts = list(thing)
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
    for part in parts:
        if not isinstance(part, observe.Attachment):  # belongs to the model
            yield from _reachable(part, known)


def _bytes(cache: EvictingCache) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in _reachable([cache.layers, cache._choirs], set())
    }
    return sum(storages.values())


@every_policy
@every_implementation
@pytest.mark.parametrize("padded", [False, True], ids=["even", "ragged"])
def test_nbytes_counts_every_storage_once_and_whole(name, implementation, padded):
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    assert cache.nbytes == 0
    ids, mask = text(3), ragged_mask() if padded else None
    done = 0
    for block in blocks_of(ids):
        done += block.shape[1]
        forward(model, cache, block, None if mask is None else mask[:, :done])
        assert cache.nbytes == _bytes(cache)
        keys_and_values = 2 * 3 * KV_HEADS * HEAD * 4 * sum(layer.stored for layer in cache.evicting_layers)
        assert cache.nbytes >= keys_and_values
    if name != "full":
        assert cache.nbytes < 2 * 3 * 3 * KV_HEADS * HEAD * 4 * done  # less than the full cache's keys and values


@every_policy
@every_implementation
def test_a_long_prompt_is_freed_once_it_is_cut(name, implementation, monkeypatch):
    if name == "full":
        pytest.skip("full keeps every prompt")
    model = tiny(implementation)
    given: list[StorageWeakRef] = []
    update = EvictingLayer.update

    def watched(self, key_states, value_states, *args, **kwargs):
        keys, values = update(self, key_states, value_states, *args, **kwargs)
        given.extend(StorageWeakRef(t.untyped_storage()) for t in (key_states, value_states, keys, values))
        return keys, values

    monkeypatch.setattr(EvictingLayer, "update", watched)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    gc.disable()
    try:
        forward(model, cache, text(length=400))
        assert len(given) == 12
        assert all(reference.expired() for reference in given)
    finally:
        gc.enable()
    budgets = cache.policy.layer_budgets(BUDGET, 3, 400)
    for layer, budget in zip(cache.evicting_layers, budgets, strict=True):
        assert layer.keys.untyped_storage().nbytes() == KV_HEADS * (budget + 1) * HEAD * 4  # one slot to write next
        assert layer.values.untyped_storage().nbytes() == KV_HEADS * (budget + 1) * HEAD * 4


@every_policy
@every_implementation
def test_deleting_a_cache_frees_it_without_garbage_collection(name, implementation):
    model = tiny(implementation)
    gc.disable()
    try:
        cache = EvictingCache(model, small(name), budget=BUDGET)
        loop(model, cache, blocks_of(text()))
        alive = weakref.ref(cache)
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in _reachable(cache.layers, set())]
        assert len(storages) >= 9 and not any(reference.expired() for reference in storages)
        del cache
        assert alive() is None
        assert all(reference.expired() for reference in storages)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "implementation"), [("h2o", "sdpa"), ("h2o", "eager"), ("streaming_llm", "sdpa"), ("adaptive_ema", "sdpa")]
)
def test_two_thousand_steps_take_no_more_than_the_first(name, implementation):
    model = tiny(implementation, num_hidden_layers=1, max_position_embeddings=4096)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    forward(model, cache, text(length=20))
    ids = text(length=2001)
    for token in ids[:, :50].split(1, 1):
        forward(model, cache, token)
    gc.collect()
    size, pointers, objects = cache.nbytes, _pointers(cache), len(gc.get_objects())
    for token in ids[:, 50:].split(1, 1):
        forward(model, cache, token)
        assert cache.nbytes == size
    gc.collect()
    assert _pointers(cache) == pointers  # written in place, never moved
    assert len(gc.get_objects()) - objects < 100
    assert (cache.get_seq_length(), cache.stored) == (2021, [BUDGET])


def _pointers(cache: EvictingCache) -> list[int]:
    return [tensor.data_ptr() for layer in cache.evicting_layers for tensor in (layer.keys, layer.values)]


@every_policy
@every_implementation
def test_a_decode_step_overwrites_the_slot_it_frees(name, implementation):
    """All slots but the freed one stay bit by bit where they were."""
    if name in ("full", "scissorhands"):
        pytest.skip("full frees no slot; Scissorhands cuts many at once, into new tensors")
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, cache, blocks_of(text(length=24), [20, 1, 1, 1, 1]))
    layer = cache.evicting_layers[1]
    before, positions = layer.keys.clone(), layer.slot_positions.clone()
    pointers = _pointers(cache)
    forward(model, cache, text(length=1))
    assert _pointers(cache) == pointers
    changed = (layer.keys != before).any(-1)[:, :, : layer.slots].sum(-1)
    assert changed.tolist() == [[1, 1]]
    assert (layer.slot_positions != positions).sum(-1).max() <= 2  # one arrives, one goes


@every_policy
@every_implementation
def test_no_graph_is_kept_when_gradients_are_on(name, implementation):
    model = tiny(implementation).train()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    for block in blocks_of(text(), [20, 1, 1, 3, 1, 10]):
        arguments = {host.cache_argument(model): cache, "use_cache": True}
        logits = model(block, **arguments).logits
        assert logits.requires_grad
    for tensor in _reachable(cache.layers, set()):
        assert not tensor.requires_grad
        assert tensor.grad_fn is None
    assert all(positions.shape[-1] == stored for positions, stored in zip(kept(cache), cache.stored, strict=True))


@every_policy
def test_gradients_of_a_forward_are_the_full_caches(name):
    grads = []
    for evicting in (True, False):
        model = tiny()
        cache = EvictingCache(model, small(name), budget=BUDGET) if evicting else None
        arguments = {} if cache is None else {host.cache_argument(model): cache}
        model(text(length=20), **arguments).logits.float().pow(2).mean().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert float(grads[1].abs().max()) > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OBSERVING)
def test_statistics_of_a_long_prompt_never_make_a_matrix_of_queries_by_keys(name, monkeypatch):
    length = 700
    largest: list[int] = []
    rows = observe.attention_rows

    def watched(*args: Any, **kwargs: Any) -> Iterator[tuple[int, Tensor]]:
        for start, weights in rows(*args, **kwargs):
            largest.append(weights.shape[3])
            yield start, weights

    monkeypatch.setattr(observe, "attention_rows", watched)
    model = tiny()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    with _LargestTensor() as seen:
        forward(model, cache, text(length=length))
    assert max(largest) <= statistics.CPU_BLOCK
    assert sum(largest) == 3 * min(length, cache.policy.queries)  # only the rows that the policy declares
    # a block of weights is heads x CPU_BLOCK x length; a matrix would be heads x length x length
    assert seen.elements < 4 * length * length / 2
    assert seen.elements >= 4 * min(statistics.CPU_BLOCK, cache.policy.queries) * (length - statistics.CPU_BLOCK)


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest floating-point tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_key_heads_are_stored_once_not_per_query_head(name):
    model = tiny()
    cache = EvictingCache(model, name, budget=BUDGET)
    forward(model, cache, text(length=20))
    assert [layer.keys.shape[:2] for layer in cache.evicting_layers] == [(1, KV_HEADS)] * 3
    assert cache.kept_positions(0).shape == (1, KV_HEADS, BUDGET)


def test_resetting_frees_everything():
    model = tiny()
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    loop(model, cache, blocks_of(text()))
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in _reachable(cache.layers, set())]
    cache.reset()
    assert all(reference.expired() for reference in storages)


def test_a_growing_share_does_not_move_the_cache_every_other_step():
    model = tiny()
    cache = EvictingCache(model, "random", budget=0.5)
    forward(model, cache, text(length=100))
    places = set()
    for token in text(length=96).split(1, 1):
        forward(model, cache, token)
        places.add(cache.layers[0].keys.untyped_storage().data_ptr())
    assert cache.stored == [98] * 3
    assert len(places) < 16
    slots = cache.layers[0].keys.shape[2]
    assert slots <= 98 * 9 // 8 + 1
