"""Keys and values that leave the model's device between forwards come back as they went."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from helpers import (
    BUDGET,
    LAYERS,
    PROMPT,
    alone_and_padded,
    batch,
    blocks_of,
    by_position,
    every_implementation,
    every_policy,
    generate,
    kept,
    loop,
    small,
    text,
    tiny,
)
from torch import Tensor

from kvevict import EvictingCache, OptionError, offloaded
from kvevict.layer import EvictingLayer
from kvevict.offloaded import OffloadedLayer


@pytest.fixture
def travels(monkeypatch) -> list[str]:
    """Every move between devices. What was left behind is NaN, as on a machine with two devices it would be gone."""
    moves: list[str] = []

    def away(tensor: Tensor) -> Tensor:
        moves.append("away")
        kept_on_cpu = tensor.clone()
        tensor.fill_(torch.nan)
        return kept_on_cpu

    def back(tensor: Tensor, device: torch.device) -> Tensor:
        moves.append("back")
        fetched = tensor.to(device).clone()
        tensor.fill_(torch.nan)
        return fetched

    monkeypatch.setattr(offloaded, "send_away", away)
    monkeypatch.setattr(offloaded, "fetch", back)
    return moves


@every_policy
@every_implementation
@alone_and_padded
def test_offloading_changes_nothing_but_where_tokens_rest(name, implementation, padded, travels, monkeypatch):
    monkeypatch.setattr(EvictingLayer, "stays_put", False)  # the resident one takes the same steps, to the last bit
    model = tiny(implementation)
    ids, mask = batch(padded)
    resident = EvictingCache(model, small(name), budget=BUDGET)
    moving = EvictingCache(model, small(name), budget=BUDGET, offloading=True)
    blocks = blocks_of(ids)
    expected = loop(model, resident, blocks, mask, positions=True)
    assert not travels
    got = loop(model, moving, blocks, mask, positions=True)
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(got, expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(kept(moving), kept(resident), strict=True))
    for one, other in zip(by_position(moving), by_position(resident), strict=True):
        assert all(torch.equal(values, other[column]) for column, values in one.items())
    assert moving.nbytes == resident.nbytes
    assert sorted(travels) == ["away"] * 2 * LAYERS * len(blocks) + ["back"] * 2 * LAYERS * len(blocks)
    if name != "adaptive_ema":  # its layers wait for the last one's vote
        assert travels == ["back", "back", "away", "away"] * LAYERS * len(blocks)  # one layer at a time


@every_implementation
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate_gives_what_it_gives_without_offloading(implementation, how, travels):
    model, ids = tiny(implementation), text(length=6).repeat(1, 4)
    caches = [EvictingCache(model, "streaming_llm", budget=BUDGET, offloading=moved) for moved in (False, True)]
    expected, got = (generate(model, ids, cache, return_dict_in_generate=False, **how) for cache in caches)
    assert torch.equal(got, expected)
    assert travels


def test_copies_and_files_go_on_offloaded(travels, tmp_path, monkeypatch):
    monkeypatch.setattr(EvictingLayer, "stays_put", False)  # as above
    model, ids = tiny(), text(length=PROMPT + 10)
    cache = EvictingCache(model, "h2o", budget=BUDGET, offloading=True)
    loop(model, cache, [ids[:, :PROMPT]])
    cache.save(tmp_path)
    others = [copy.deepcopy(cache), EvictingCache.load(model, tmp_path, offloading=True)]
    resident = EvictingCache.load(model, tmp_path)
    for other in others:
        assert all(isinstance(layer, OffloadedLayer) for layer in other.layers)
    steps = ids[:, PROMPT:].split(1, 1)
    expected = loop(model, resident, steps)
    for other in (cache, *others):
        assert all(map(torch.equal, loop(model, other, steps), expected))


def test_offloading_goes_with_models_under_accelerates_hooks(travels):
    model, blocks = tiny(), blocks_of(text())
    expected = loop(model, EvictingCache(model, "h2o", budget=BUDGET, offloading=True), blocks)
    moved: Any = tiny()
    cpu_offload(moved, torch.device("cpu"))
    travels.clear()
    # a loop of our own: generate() of older releases warns that such a model is on the device "meta"
    got = loop(moved, EvictingCache(moved, "h2o", budget=BUDGET, offloading=True), blocks)
    assert all(map(torch.equal, got, expected))
    assert travels


@pytest.mark.parametrize("value", ["cpu", 1, None])
def test_offloading_is_yes_or_no(value):
    with pytest.raises(OptionError, match="offloading="):
        EvictingCache(tiny(), "h2o", budget=BUDGET, offloading=value)


def test_packed_tokens_are_not_offloaded():
    pytest.importorskip("optimum.quanto", reason="needs the package optimum-quanto: pip install 'kvevict[quanto]'")
    with pytest.raises(OptionError, match="offloading=True"):
        EvictingCache(tiny(), "h2o", budget=BUDGET, storage="quanto4", offloading=True)
