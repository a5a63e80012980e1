"""A compiled forward decodes as the uncompiled one does, and is compiled once."""

from __future__ import annotations

import pytest
import torch
from helpers import BUDGET, NOISE, PROMPT, every_implementation, forward, kept, small, text, tiny
from torch import _dynamo as dynamo

from kvevict import EvictingCache, host


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    dynamo.reset()
    dynamo.utils.counters.clear()


@pytest.mark.parametrize("name", ["h2o", "random"])
@every_implementation
def test_decoding_at_a_full_cache_is_compiled_once(name, implementation):
    """aot_eager traces as the default backend does, without compiling kernels for a minute."""
    model = tiny(implementation, num_hidden_layers=2)
    ids = text(length=PROMPT + 8)
    plain, compiled = (EvictingCache(model, small(name), budget=BUDGET) for _ in range(2))
    for cache in (plain, compiled):
        forward(model, cache, ids[:, :PROMPT])
    step = torch.compile(model.forward, backend="aot_eager")
    graphs = []
    for token in ids[:, PROMPT:].split(1, 1):
        with torch.no_grad():
            got = step(token, use_cache=True, **{host.cache_argument(model): compiled}).logits
        assert (got - forward(model, plain, token)).abs().max() < NOISE
        graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[2:] == [graphs[1]] * 6  # the second step knows that sizes stay
    assert all(torch.equal(*pair) for pair in zip(kept(plain), kept(compiled), strict=True))
