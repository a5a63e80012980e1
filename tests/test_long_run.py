"""Twenty thousand tokens through a budget of 64: nothing grows, and nothing drifts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import NOISE, forward, tiny
from torch import Tensor
from transformers import DynamicCache

from kvevict import EvictingCache, host, statistics
from kvevict.layer import EvictingLayer
from kvevict.policies import make_policy
from kvevict.spec import Spec

TOKENS, BUDGET, PROMPT = 20_000, 64, 80
HEADS, GROUP, HEAD = 2, 2, 8
DRIFT = 1e-4
"""Relative. The heaviest token's score is a float32 sum of 20,000 weights, whose roundings, 2**-24 each, add up like a
random walk to 1e-5. A sum kept in bfloat16 stands still at 256 times its terms."""
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Reference:
    """H2O by its formula in float64, for every token that ever came: kept (H, L), sums (H, TOKENS)."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys.double()
        self.kept = torch.empty(HEADS, 0, dtype=torch.long)
        self.sums = torch.zeros(HEADS, TOKENS, dtype=torch.float64)

    def attend(self, queries: Tensor, first: int) -> None:
        """The tokens from ``first`` on arrive with their queries (H, G, Q, D), and see all that is kept."""
        new = torch.arange(first, first + queries.shape[2])
        self.kept = torch.cat([self.kept, new.expand(HEADS, -1)], 1)
        held = self.keys.gather(1, self.kept[..., None].expand(-1, -1, HEAD))  # (H, L, D)
        logits = queries.double() @ held.transpose(1, 2)[:, None] * HEAD**-0.5  # (H, G, Q, L)
        logits = logits.masked_fill(self.kept[:, None, None] > new[:, None], float("-inf"))
        self.sums.scatter_add_(1, self.kept, logits.softmax(-1).sum(2).mean(1))

    def evict(self, kept: Tensor) -> None:
        """Follows the layer, whose choice must be right: a rounding may decide only between equals."""
        candidates = self.kept <= self.kept.max() - BUDGET // 2
        scores = self.sums.gather(1, self.kept)
        gone = ~(self.kept[:, :, None] == kept[:, None]).any(-1)  # (H, L)
        assert gone.sum(1).tolist() == [self.kept.shape[1] - BUDGET] * HEADS
        assert bool((candidates | ~gone).all())
        dearest = scores.masked_fill(~gone, 0).amax(1)
        cheapest = scores.masked_fill(gone | ~candidates, float("inf")).amin(1)
        assert bool((dearest <= cheapest * (1 + DRIFT)).all())
        self.kept = self.kept[~gone].view(HEADS, BUDGET)


def _layer() -> EvictingLayer:
    return EvictingLayer(Spec(make_policy("h2o"), BUDGET, 1), 0)


def _feed(layer: EvictingLayer, queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """One forward of one layer, as a model does it."""
    held, _ = layer.update(keys[None], values[None])
    mask = layer.exact_mask(None, HEADS * GROUP)
    rows = statistics.attention_rows(queries.flatten(0, 1)[None], held, mask, scaling=HEAD**-0.5, last=queries.shape[2])
    layer.observe(rows)
    layer.settle()


@both_types
def test_scores_after_twenty_thousand_steps_are_those_of_float64(dtype):
    drawn = torch.Generator().manual_seed(0)
    keys, values, queries = (
        torch.randn(HEADS, TOKENS, HEAD, generator=drawn).to(dtype),
        torch.randn(HEADS, TOKENS, HEAD, generator=drawn).to(dtype),
        torch.randn(HEADS, GROUP, TOKENS, HEAD, generator=drawn).to(dtype),
    )
    keys[:, 7] *= 4  # a heavy hitter, whose score grows to the end
    queries += 0.5 * keys[:, None, 7:8].sign()
    layer, reference, bytes_held = _layer(), Reference(keys), set()
    starts = [0, *range(PROMPT, TOKENS)]
    for start, stop in zip(starts, [*starts[1:], TOKENS], strict=True):
        new = slice(start, stop)
        _feed(layer, queries[:, :, new], keys[:, new], values[:, new])
        reference.attend(queries[:, :, new], start)
        positions = layer.slot_positions[0]
        reference.evict(positions)
        if start > PROMPT:
            bytes_held.add(sum(t.untyped_storage().nbytes() for t in layer.tensors()))
    assert len(bytes_held) == 1
    assert layer.seen == TOKENS and layer.stored == BUDGET
    assert torch.equal(layer.kept_positions()[0], reference.kept)
    order = positions.argsort(1)[:, -BUDGET:]  # what is empty comes first
    scores = layer.held()["score"][0].gather(1, order).double()
    expected = reference.sums.gather(1, reference.kept)
    heaviest = reference.kept.gather(1, expected.argmax(1, keepdim=True))
    assert heaviest.tolist() == [[7]] * HEADS and expected.max() > 1000
    torch.testing.assert_close(scores, expected, rtol=DRIFT, atol=DRIFT)
    index = order[..., None].expand(-1, -1, HEAD)
    where = reference.kept[..., None].expand(-1, -1, HEAD)
    assert torch.equal(layer.held().keys[0].gather(1, index), keys.gather(1, where))
    assert torch.equal(layer.held().values[0].gather(1, index), values.gather(1, where))


def _fresh(model: Any, ids: Tensor, kept: Tensor, last: int) -> Tensor:
    """The logits of the last tokens, given a cache that never held more than what is kept."""
    cache = DynamicCache(config=model.config)
    named = {host.cache_argument(model): cache}
    with torch.no_grad():
        model(ids[:, kept], position_ids=kept[None], **named)
        return model(ids[:, -last:], position_ids=torch.arange(TOKENS - last, TOKENS)[None], **named).logits


@both_types
@pytest.mark.parametrize("name", ["streaming_llm", "h2o"])
def test_logits_after_twenty_thousand_tokens_are_those_of_what_is_kept(name, dtype):
    """With one layer and one KV head the cache is a plain list of tokens, which a fresh one can be given."""
    model = tiny(dtype=dtype, num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=2 * TOKENS)
    ids = torch.randint(1, 97, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    cache = EvictingCache(model, name, budget=BUDGET)
    bytes_held = set()
    blocks = ids.split(40, 1)
    for block in blocks:
        kept = cache.kept_positions(0)
        logits = forward(model, cache, block)
        if cache.get_seq_length() > BUDGET + 40:
            bytes_held.add(cache.nbytes)
    assert len(bytes_held) == 1 and cache.get_seq_length() == TOKENS and cache.stored == [BUDGET]
    expected = _fresh(model, ids, kept[0, 0], 40)
    # bfloat16 has 8 bits: logits of size 10 move by a few hundredths
    assert (logits - expected).abs().max() < (NOISE if dtype == torch.float32 else 0.2)
