"""Masks over slots: when causality is all that transformers' mask says, and when it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BUDGET, KV_HEADS, LAYERS, NOISE, PROMPT, forward, kept, small, text, tiny
from torch import Tensor

from kvevict import EvictingCache, masks, observe
from kvevict.masks import is_causal, newest_causal

CHUNK = 6
LOWEST = torch.finfo(torch.float32).min


def plain(queries: int = 3, tokens: int = 7) -> Tensor:
    """Causality of the newest queries: (2, 1, queries, tokens) bool."""
    return newest_causal(queries, tokens, torch.empty(0)).repeat(2, 1, 1, 1)


def changed(mask: Tensor, query: int, token: int, value: Any) -> Tensor:
    mask = mask.clone()
    mask[1, 0, query, token] = value
    return mask


ADDED = masks.additive(plain(), torch.float32)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (plain(), True),
        (ADDED, True),
        (ADDED.clamp_min(-1e9), True),
        (plain(3, 3), True),
        (changed(plain(), 0, 2, False), False),  # an old token hidden from one query of one row
        (changed(plain(), 2, 5, False), False),  # a new one hidden
        (changed(plain(), 0, 6, True), False),  # a later one shown
        (changed(ADDED, 2, 0, LOWEST), False),
        (changed(ADDED, 2, 0, 0.25), False),  # a bias
        (changed(ADDED, 0, 6, -1.0), False),  # a later one shown a little
    ],
)
def test_a_mask_is_causal_if_it_says_nothing_else(mask, expected):
    assert is_causal(mask) is expected
    with torch.inference_mode():
        assert is_causal(mask.clone()) is expected


def test_a_mask_that_is_written_to_is_looked_at_again():
    mask = plain()
    assert is_causal(mask)
    mask[0, 0, 2, 0] = False
    assert not is_causal(mask)


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that attention rows are computed with."""
    seen: list[Any] = []
    rows = observe.attention_rows

    def watched(query: Tensor, keys: Tensor, mask: Tensor | None, **options: Any) -> Any:
        seen.append(mask)
        return rows(query, keys, mask, **options)

    monkeypatch.setattr(observe, "attention_rows", watched)
    return seen


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["h2o", "tova", "streaming_llm", "adaptive_ema"])
def test_a_piece_after_an_eviction_equals_the_mask_gathered_for_each_head(name, implementation, monkeypatch):
    model, ids = tiny(implementation), text(2, PROMPT + 3 * CHUNK)
    blocks = ids.split([PROMPT, CHUNK, CHUNK, CHUNK], 1)
    runs = []
    for is_plain in (is_causal, lambda mask: False):  # never plain: every head's own mask
        monkeypatch.setattr(masks, "is_causal", is_plain)
        cache = EvictingCache(model, small(name), budget=BUDGET)
        runs.append(([forward(model, cache, block) for block in blocks], kept(cache)))
    (ours, held), (expected, theirs) = runs
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=NOISE)
    assert all(map(torch.equal, held, theirs))


def test_a_piece_after_an_eviction_needs_no_mask_for_each_head(monkeypatch):
    seen = _watched(monkeypatch)
    model, ids = tiny(), text(1, PROMPT + CHUNK)
    cache = EvictingCache(model, small("h2o"), budget=BUDGET)
    forward(model, cache, ids[:, :PROMPT])
    assert cache.stored == [BUDGET] * LAYERS
    forward(model, cache, ids[:, PROMPT:])
    assert seen == [None] * 2 * LAYERS


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_that_hides_an_old_token_still_hides_it_in_every_head(monkeypatch, kind):
    seen = _watched(monkeypatch)
    model, ids = tiny(), text(1, PROMPT + CHUNK)
    cache = EvictingCache(model, small("h2o"), budget=BUDGET)
    forward(model, cache, ids[:, :PROMPT])
    hidden = int(cache.kept_positions(0)[0, 0, 0])
    mask = newest_causal(CHUNK, PROMPT + CHUNK, ids).clone()
    mask[..., hidden] = False
    forward(model, cache, ids[:, PROMPT:], mask if kind == torch.bool else masks.additive(mask, kind))
    told = seen[LAYERS]  # the first layer's, at the second piece
    assert told is not None
    assert told.shape[1] in (KV_HEADS, 2 * KV_HEADS)
    assert int((~masks.visible(told)).all(2).sum()) >= told.shape[1] // KV_HEADS  # one slot of each head that held it
