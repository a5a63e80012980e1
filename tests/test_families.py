"""Every causal-LM family of transformers: supported, refused with a message, or not built with a reason."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from families import FAMILIES, OTHER_RELEASES, RELEASE, Row, found, model_of, recorded, written
from helpers import NOISE, alone_and_padded, blocks_of, generate, largest_error, loop, ragged_mask, text
from torch import Tensor
from transformers import DynamicCache

from kvevict import EvictingCache, host, testing

BUDGET, ROOM, PROMPT = 9, 64, 20
BLOCKS = (PROMPT, 1, 1, 6, 1, 1)
"""A prompt, decode steps, and a turn of several tokens after an eviction."""
POLICIES = ["h2o", "random"]

# in older releases GPT-BigCode compiles its softmax when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

NEWEST, ROWS = recorded()
OLDER = tuple(map(int, RELEASE.split("."))) < tuple(map(int, NEWEST.split(".")))
DIFFERING = OTHER_RELEASES.get(RELEASE, {})


def _row(family: str) -> Row:
    """What the table says about a family in this release."""
    return DIFFERING.get(family, ROWS.get(family, Row("unknown", "")))


SUPPORTED = [family for family in FAMILIES if _row(family).outcome == "supported"]
every_family = pytest.mark.parametrize("family", FAMILIES)
every_supported_family = pytest.mark.parametrize("family", SUPPORTED)


def _inputs(padded: bool) -> tuple[Tensor, Tensor | None]:
    ids = text(3, sum(BLOCKS))
    return (ids, ragged_mask(sum(BLOCKS))) if padded else (ids[:1], None)


def _full(model: Any) -> DynamicCache:
    return DynamicCache(config=host.decoder_config(model))


@functools.lru_cache(maxsize=4)
def _in_full(family: str, padded: bool) -> tuple[list[Tensor], float]:
    """Each forward's logits with everything kept, and how large they are at least taken to be."""
    ids, mask = _inputs(padded)
    logits = loop(model_of(family), _full(model_of(family)), blocks_of(ids, BLOCKS), mask)
    return logits, max(1.0, *(float(each.abs().max()) for each in logits))


# -- the table -----------------------------------------------------------------------------------------------------


def test_the_table_has_every_family_of_the_newest_release_and_no_other():
    if OLDER:
        pytest.skip(f"the table is for transformers {NEWEST}")
    assert sorted(ROWS) == FAMILIES, "run: python tests/families.py > docs/models.md"


@every_family
def test_the_table_says_what_becomes_of_a_family(family):
    row = found(family)
    expected = ROWS.get(family)
    if family in DIFFERING:
        assert row.outcome == DIFFERING[family].outcome
        assert row.outcome == "not built" or DIFFERING[family].remark in row.remark
    elif OLDER and row.outcome == "supported":
        assert expected is not None and expected.outcome == row.outcome  # which of its layers evict may have changed
    else:
        assert Row(row.outcome, written(family, row)) == expected, "run: python tests/families.py > docs/models.md"


# -- the contract --------------------------------------------------------------------------------------------------


@every_supported_family
@alone_and_padded
def test_with_room_a_family_is_identical_to_dynamic_cache(family, padded):
    model = model_of(family)
    ids, mask = _inputs(padded)
    blocks = blocks_of(ids, BLOCKS)
    looped, _ = _in_full(family, padded)
    for name in POLICIES:
        with EvictingCache(model, name, budget=ROOM) as cache:
            assert largest_error(loop(model, cache, blocks, mask), looped, blocks, mask) == 0


@pytest.mark.skipif("musicgen" not in SUPPORTED, reason="this release does not build musicgen")
@alone_and_padded
def test_musicgens_own_generate_fails_whatever_the_cache(padded):
    ids, mask = _inputs(padded)
    model = model_of("musicgen")
    with pytest.raises(TypeError):
        generate(model, ids[:, :PROMPT], _full(model), None if mask is None else mask[:, :PROMPT], new=4)


@every_supported_family
@alone_and_padded
def test_with_room_a_family_generates_what_it_generates_with_dynamic_cache(family, padded):
    if family == "musicgen":
        pytest.skip("its own generate() loses the text, whatever the cache: see the test above")
    model = model_of(family)
    ids, mask = _inputs(padded)
    prompt = None if mask is None else mask[:, :PROMPT]
    expected = generate(model, ids[:, :PROMPT], _full(model), prompt, new=4)
    for name in POLICIES:
        with EvictingCache(model, name, budget=ROOM) as cache:
            got = generate(model, ids[:, :PROMPT], cache, prompt, new=4)
        assert torch.equal(got.sequences, expected.sequences)
        assert all(map(torch.equal, got.logits, expected.logits))


def _against_reference(
    model: Any, reference: Any, name: str, blocks: list[Tensor], mask: Tensor | None
) -> tuple[float, list[Tensor]]:
    """The largest error after evictions; no layer may ever hold more than its budget."""
    with EvictingCache(model, name, budget=BUDGET) as cache:
        got, held = testing.run(model, cache, blocks, mask)
    assert cache.stored == [BUDGET] * len(cache.evicting_layers)
    assert max(positions.shape[-1] for layers in held for positions in layers) == BUDGET
    return largest_error(got, testing.replay(reference, held, blocks, mask), blocks, mask), got


@every_supported_family
@alone_and_padded
def test_after_eviction_a_familys_logits_equal_the_reference(family, padded):
    model = model_of(family)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids, mask = _inputs(padded)
    blocks = blocks_of(ids, BLOCKS)
    full, size = _in_full(family, padded)
    for name in POLICIES:
        error, got = _against_reference(model, eager, name, blocks, mask)
        assert error < 5 * NOISE * size
        assert padded or (got[-1] - full[-1]).abs().max() > 100 * 5 * NOISE * size  # what was evicted is missed


@every_supported_family
def test_with_eager_attention_a_familys_logits_equal_the_reference(family):
    eager = copy.deepcopy(model_of(family))
    eager.set_attn_implementation("eager")
    ids, mask = _inputs(True)
    reference = copy.deepcopy(eager)
    for name in POLICIES:
        error, _ = _against_reference(eager, reference, name, blocks_of(ids, BLOCKS), mask)
        assert error < 5 * NOISE * _in_full(family, True)[1]


@every_supported_family
def test_no_token_of_a_family_sees_a_later_one(family):
    model = model_of(family)
    blocks = blocks_of(text(length=sum(BLOCKS)), BLOCKS)[:4]
    changed = blocks[3].clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 97
    _, size = _in_full(family, False)
    for name in POLICIES:
        got = []
        for turn in (blocks[3], changed):
            with EvictingCache(model, name, budget=BUDGET) as cache:
                got.append(loop(model, cache, [*blocks[:3], turn])[-1])
        earlier, later = (got[0] - got[1]).abs().split(3, 1)
        assert earlier.max() < 5 * NOISE * size  # experts of a mixture work on other tokens, and round differently
        assert later.max() > 100 * 5 * NOISE * size
