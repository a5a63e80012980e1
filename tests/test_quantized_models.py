"""Models whose weights are quantised attend and evict as any other: the cache sees their keys and values only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BUDGET, NOISE, PROMPT, every_implementation, forward, generate, kept, small, text, tiny
from torch import Tensor

from kvevict import EvictingCache, WrongModelError, detach, testing

NEW = 10
some_policies = pytest.mark.parametrize("name", ["h2o", "random", "adaptive_ema"])


def _quantized(implementation: str, width: str) -> Any:
    quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install 'kvevict[quanto]'")
    model = tiny(implementation)
    quanto.quantize(model, weights=getattr(quanto, width))
    quanto.freeze(model)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, quanto.QTensor)
    return model


def _against_the_reference(model: Any, eager: Any, policy: Any, prompt: Tensor, budget: int) -> tuple[float, float]:
    """Largest error of generate()'s logits, and how far the full cache's are away."""
    out = generate(model, prompt, EvictingCache(model, policy, budget=budget), new=NEW)
    forwards = [prompt, *out.sequences[:, prompt.shape[1] : -1].split(1, 1)]
    _, held = testing.run(model, EvictingCache(model, policy, budget=budget), forwards)
    assert held[-1][0].shape[-1] == budget
    expected = [logits[:, -1] for logits in testing.replay(eager, held, forwards)]
    detach(model)
    full = forward(eager, None, out.sequences[:, :-1])[:, -NEW:].unbind(1)
    error = max(float((one - other).abs().max()) for one, other in zip(out.logits, expected, strict=True))
    missed = max(float((one - other).abs().max()) for one, other in zip(out.logits, full, strict=True))
    return error, missed


@every_implementation
@some_policies
@pytest.mark.parametrize("width", ["qint8", "qint4"])
def test_with_quantos_weights_generate_equals_the_reference(implementation, name, width):
    model, eager = _quantized(implementation, width), _quantized("eager", width)
    error, missed = _against_the_reference(model, eager, small(name), text(length=PROMPT), BUDGET)
    assert error < NOISE
    assert missed > 1000 * NOISE


def test_a_cache_of_a_quantised_model_goes_to_a_file_and_back(tmp_path):
    model, prompt = _quantized("sdpa", "qint8"), text(length=PROMPT)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, cache, prompt)
    cache.save(tmp_path)
    again = EvictingCache.load(model, tmp_path)
    step = text(length=1, seed=4)
    assert torch.equal(forward(model, cache, step), forward(model, again, step))
    assert all(map(torch.equal, kept(cache), kept(again)))
    with pytest.raises(WrongModelError):
        EvictingCache.load(tiny(), tmp_path)
