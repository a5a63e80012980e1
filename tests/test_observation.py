"""How attention is seen: nothing installed where nothing is needed, taken out exactly, and the same by every way."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BLOCKS,
    BUDGET,
    FREE,
    HEADS,
    IMPLEMENTATIONS,
    KV_HEADS,
    LENGTHS,
    NOISE,
    OBSERVING,
    PROMPT,
    VOCABULARY,
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
    plain,
    registries,
    sharpened,
    small,
    snapshot,
    text,
    tiny,
)
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask

from kvevict import EvictingCache, ObservationError, UnsupportedModelError, detach, host, observe, statistics, testing
from kvevict.policies import H2O, Attention
from kvevict.statistics import CPU_BLOCK, attention_rows

ROOM = 64
FP32 = 1e-5  # softmax weights of size 1, added up over at most 40 queries in another order


# -- what is installed, and taken out again ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FREE)
@every_implementation
@alone_and_padded
def test_policies_that_need_no_attention_install_nothing(name, implementation, padded):
    model = tiny(implementation)
    ids, mask = batch(padded)
    before, tables = snapshot(model), registries()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    assert snapshot(model) == before
    loop(model, cache, blocks_of(ids), mask)
    assert snapshot(model) == before
    assert registries() == tables


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "renamed"])
def test_policies_that_need_no_attention_compute_none(name, implementation, register_kernel, monkeypatch):
    register_kernel("renamed", sdpa_attention_forward, sdpa_mask)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("attention was recomputed for a policy that asked for none")

    monkeypatch.setattr(observe, "attention_rows", refuse)
    ids, mask = batch(True)
    model = tiny(implementation)
    loop(model, EvictingCache(model, small(name), budget=BUDGET), blocks_of(ids), mask)
    model = tiny()
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    with pytest.raises(AssertionError, match="asked for none"):  # the trap works
        forward(model, cache, ids)


@pytest.mark.parametrize("name", OBSERVING)
@every_implementation
def test_detach_puts_the_model_back_exactly(name, implementation):
    model = tiny(implementation)
    before = snapshot(model)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    assert snapshot(model) != before
    loop(model, cache, blocks_of(text()))
    detach(model)
    assert snapshot(model) == before
    detach(model)  # nothing left to do, and no error
    assert snapshot(model) == before


@every_policy
@every_implementation
def test_leaving_the_with_block_puts_the_model_back(name, implementation):
    model = tiny(implementation)
    before = snapshot(model)
    with EvictingCache(model, small(name), budget=BUDGET) as cache:
        loop(model, cache, blocks_of(text()))
    assert snapshot(model) == before
    error = pytest.raises(KeyError, match="user's own")
    with error, EvictingCache(model, small(name), budget=BUDGET) as cache:
        raise KeyError("user's own")
    assert snapshot(model) == before


@every_implementation
def test_the_last_cache_to_leave_takes_the_installation_along(implementation):
    model = tiny(implementation)
    before = snapshot(model)
    blocks = blocks_of(text())
    alone = loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks)
    detach(model)
    with EvictingCache(model, "h2o", budget=BUDGET) as first:
        with EvictingCache(model, "tova", budget=BUDGET) as second:
            loop(model, second, blocks)
            start = loop(model, first, blocks[:4])
        rest = loop(model, first, blocks[4:])
    assert all(torch.equal(one, other) for one, other in zip(start + rest, alone, strict=True))
    assert snapshot(model) == before


@every_implementation
def test_a_copy_made_inside_the_with_block_works_after_it(implementation):
    model = tiny(implementation)
    blocks = blocks_of(text())
    expected = loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks)
    detach(model)
    before = snapshot(model)
    with EvictingCache(model, "h2o", budget=BUDGET) as cache:
        loop(model, cache, blocks[:4])
        copied = copy.deepcopy(cache)
    got = loop(model, copied, blocks[4:])
    assert all(torch.equal(one, other) for one, other in zip(got, expected[4:], strict=True))
    detach(model)
    assert snapshot(model) == before


@every_implementation
def test_a_detached_cache_raises_at_the_next_update(implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, cache, text(length=PROMPT))
    held = kept(cache)
    detach(model)
    with pytest.raises(ObservationError, match="build a new EvictingCache"):
        forward(model, cache, text(length=1))
    assert cache.get_seq_length() == PROMPT
    assert all(torch.equal(one, other) for one, other in zip(held, kept(cache), strict=True))


@every_implementation
def test_a_cache_built_after_detach_observes_again(implementation):
    model = tiny(implementation)
    blocks = blocks_of(text())
    first = loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks)
    detach(model)
    again = loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@every_policy
@every_implementation
@alone_and_padded
def test_ordinary_calls_on_a_prepared_model_give_what_they_gave(name, implementation, padded):
    model = tiny(implementation)
    ids, mask = batch(padded, PROMPT)
    options = {"attention_mask": torch.ones_like(ids) if mask is None else mask, "max_new_tokens": 6,
               "do_sample": False, "return_dict_in_generate": True, "output_logits": True}  # fmt: skip  # one call
    before = model.generate(ids, **options)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    EvictingCache(model, small(name), budget=BUDGET)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, cache, blocks_of(text()))
    after = model.generate(ids, **options)
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(one, other) for one, other in zip(before.logits, after.logits, strict=True))
    with torch.no_grad():
        again = model(ids, output_attentions=True).attentions
    if implementation == "eager":
        assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))


@every_implementation
def test_another_model_with_the_same_config_object_is_untouched(implementation):
    model = tiny(implementation)
    torch.manual_seed(3)
    other = sharpened(LlamaForCausalLM(model.config))
    assert other.config is model.config
    before = snapshot(other)
    blocks = blocks_of(text())
    expected = loop(other, plain(other), blocks)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    loop(model, cache, blocks)
    assert snapshot(other) == before
    assert other.model.layers[0].self_attn.config is other.config
    assert all(torch.equal(one, two) for one, two in zip(expected, loop(other, plain(other), blocks), strict=True))
    detach(model)
    assert snapshot(other) == before


def test_a_prepared_models_modules_still_have_the_models_config():
    model = tiny()
    EvictingCache(model, "h2o", budget=BUDGET)
    view = model.model.layers[0].self_attn.config
    assert view is not model.config  # prepared
    assert view == model.config and model.config == view and view == copy.deepcopy(model.config)
    assert view != tiny(num_hidden_layers=2).config


@every_implementation
def test_looking_at_a_prepared_models_configs_changes_nothing(implementation):
    """Printing, saving or copying a config makes new ones of its class, which must not write to this one."""
    model = tiny(implementation)
    EvictingCache(model, "h2o", budget=BUDGET)
    for config in [model.config, *(layer.self_attn.config for layer in model.model.layers)]:
        assert repr(config) and config.to_dict() and config.to_diff_dict() and config.to_json_string()
        type(config)()
        copy.deepcopy(config)
        assert host.implementation(model) == implementation
    detach(model)
    assert host.implementation(model) == implementation
    assert "kvevict" not in repr(model.config)


def _copied(model: Any, how: str) -> Any:
    return copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))


@every_implementation
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_prepared_model_works_with_any_cache(implementation, how):
    model = tiny(implementation)
    blocks = blocks_of(text())
    full = loop(model, plain(model), blocks)
    evicted = loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks)
    twin = _copied(model, how)
    assert all(torch.equal(one, two) for one, two in zip(full, loop(twin, plain(twin), blocks), strict=True))
    cache = EvictingCache(twin, "h2o", budget=BUDGET)
    assert all(torch.equal(one, two) for one, two in zip(evicted, loop(twin, cache, blocks), strict=True))
    detach(model)
    assert all(torch.equal(one, two) for one, two in zip(full, loop(model, plain(model), blocks), strict=True))


@every_implementation
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_prepared_model_is_not_prepared(implementation, how):
    clean, model = tiny(implementation), tiny(implementation)
    EvictingCache(model, "h2o", budget=BUDGET)
    twin = _copied(model, how)
    for one, other in zip(clean.modules(), twin.modules(), strict=True):
        assert type(one) is type(other)
        hooks = [*other._forward_hooks.values(), *other._forward_pre_hooks.values()]
        assert all(hook(other, (), {}, None) is None for hook in hooks)
        assert b"kvevict" not in pickle.dumps(hooks)
        if "config" in vars(one):
            assert type(other.config) is type(one.config)
            assert other.config._attn_implementation == implementation


# -- both ways see the same ----------------------------------------------------------------------------------------


@every_policy
@alone_and_padded
def test_sdpa_and_eager_keep_the_same_tokens_and_the_same_columns(name, padded):
    ids, mask = batch(padded)
    caches = []
    for implementation in IMPLEMENTATIONS:
        model = tiny(implementation)
        caches.append(EvictingCache(model, small(name), budget=BUDGET))
        loop(model, caches[-1], blocks_of(ids), mask, positions=True)
    assert all(torch.equal(one, other) for one, other in zip(*map(kept, caches), strict=True))
    for one, other in zip(*map(by_position, caches), strict=True):
        assert one.keys() == other.keys()
        for column in one:
            torch.testing.assert_close(one[column], other[column], rtol=1e-4, atol=NOISE)


def _column_sums(model: Any, blocks: list[Tensor], mask: Tensor | None = None) -> list[Tensor]:
    """Attention that each token received, over all queries, from the model's own eager weights: (B, heads, L)."""
    cache, sums, done = plain(model), [], 0
    for block in blocks:
        done += block.shape[1]
        kwargs = {host.cache_argument(model): cache}
        if mask is not None:
            kwargs["attention_mask"] = mask[:, :done]
        positions = torch.arange(done - block.shape[1], done)[None].expand(block.shape[0], -1)
        if mask is not None:
            positions = (mask[:, :done].cumsum(1) - 1).clamp_min(0)[:, -block.shape[1] :]
        with torch.no_grad():
            weights = model(block, output_attentions=True, position_ids=positions, **kwargs).attentions
        for index, layer in enumerate(weights):
            if mask is not None:
                layer = layer * mask[:, None, done - block.shape[1] : done, None]
            added = layer.sum(2)
            if len(sums) <= index:
                sums.append(added)
            elif added.shape[-1] >= sums[index].shape[-1]:  # sliding layers lose columns, nobody compares those
                sums[index] = F.pad(sums[index], (0, added.shape[-1] - sums[index].shape[-1])) + added
    return sums


@every_implementation
@alone_and_padded
@pytest.mark.parametrize("group", ["mean", "sum", "first"])
def test_statistics_are_the_sums_of_eager_attention(implementation, padded, group):
    ids, mask = batch(padded)
    model = tiny(implementation)
    cache = EvictingCache(model, H2O(group=group), budget=ROOM)
    loop(model, cache, blocks_of(ids), mask, positions=True)
    for layer, sums in enumerate(_column_sums(tiny("eager"), blocks_of(ids), mask)):
        grouped = sums.unflatten(1, (KV_HEADS, HEADS // KV_HEADS))
        expected = {"mean": grouped.mean(2), "sum": grouped.sum(2), "first": grouped[:, :, 0]}[group]
        scores = cache.evicting_layers[layer].state["score"][:, :, : expected.shape[-1]]
        assert (scores - expected).abs().max() < FP32


def test_statistics_of_queries_and_keys_are_in_float32_in_half_precision():
    """bfloat16 cannot add 1 to 256: a thousand additions would stop there."""
    for implementation in IMPLEMENTATIONS:
        model = tiny(implementation, torch.bfloat16)
        cache = EvictingCache(model, Attention(), budget=ROOM)
        forward(model, cache, text(length=4))
        layer = cache.evicting_layers[0]
        assert layer.state["score"].dtype == torch.float32
        before = float(layer.state["score"].sum())
        for _ in range(1000):
            layer.observe([(0, torch.ones(1, KV_HEADS, HEADS // KV_HEADS, 1, layer.slots))])
        assert float(layer.state["score"].sum()) - before == pytest.approx(1000 * KV_HEADS * 4, rel=1e-6)


@pytest.mark.parametrize("name", OBSERVING)
def test_every_accumulator_is_in_float32_in_half_precision(name):
    model = tiny("sdpa", torch.bfloat16)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, cache, blocks_of(text()))
    for layer in cache.evicting_layers:
        assert layer.keys.dtype == torch.bfloat16
        for column in layer.state.values():
            assert not column.dtype.is_floating_point or column.dtype == torch.float32


# -- kernels of the user's own -------------------------------------------------------------------------------------


def _flashlike(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Takes a (B, L) mask or None, and is causal from the bottom right, like flash attention."""
    queries, slots = query.shape[2], key.shape[2]
    shown = torch.ones(queries, slots, dtype=torch.bool).tril(slots - queries)[None, None]
    if attention_mask is not None:
        assert attention_mask.dim() == 2, "flash kernels take no mask per head"
        assert attention_mask.shape[1] == slots, "one column for every stored token"
        shown = shown & attention_mask[:, None, None].bool()
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * kwargs["scaling"]
    logits = logits.masked_fill(~shown, torch.finfo(logits.dtype).min)
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., :slots]
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def _assert_works_like_sdpa(model: Any, name: str, padded: bool, budget: int) -> None:
    ids, mask = batch(padded)
    other = tiny("sdpa")
    cache, expected = (EvictingCache(m, small(name), budget=budget) for m in (model, other))
    got = loop(model, cache, blocks_of(ids), mask, positions=True)
    logits = loop(other, expected, blocks_of(ids), mask, positions=True)
    assert largest_error(got, logits, blocks_of(ids), mask) < NOISE
    assert all(torch.equal(one, two) for one, two in zip(kept(cache), kept(expected), strict=True))


@every_policy
@alone_and_padded
def test_a_renamed_sdpa_works_like_sdpa(name, padded, register_kernel):
    register_kernel("renamed", sdpa_attention_forward, sdpa_mask)
    model = tiny("renamed")
    _assert_works_like_sdpa(model, name, padded, BUDGET)
    before = snapshot(tiny("renamed"))
    detach(model)
    assert len(snapshot(model)) == len(before)


@every_policy
@alone_and_padded
@pytest.mark.parametrize("budget", [BUDGET, ROOM])
def test_a_kernel_with_flat_masks_works_like_sdpa(name, padded, budget, register_kernel):
    register_kernel("flat_masks", _flashlike, flash_attention_mask)
    _assert_works_like_sdpa(tiny("flat_masks"), name, padded, budget)


def test_a_kernel_of_the_users_own_is_used_for_every_forward_without_a_mask(register_kernel):
    calls = []

    def counting(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append(args[0].layer_idx)
        return _flashlike(*args, **kwargs)

    register_kernel("counting", counting, flash_attention_mask)
    model = tiny("counting")
    loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks_of(text(), [20, 1, 1, 1, 13]))
    assert calls[: 4 * 3] == [0, 1, 2] * 4


# -- soft-caps and attention sinks ---------------------------------------------------------------------------------

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
         "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "head_dim": 16}  # fmt: skip  # one shape
FULL = ["full_attention", "full_attention"]


def _gemma2(implementation: str) -> Any:
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, layer_types=FULL)
    config._attn_implementation = implementation
    return sharpened(Gemma2ForCausalLM(config))


def _gpt_oss(implementation: str) -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, layer_types=FULL, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0})  # fmt: skip  # one config
    config._attn_implementation = implementation
    model = sharpened(GptOssForCausalLM(config))
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.tensor([1.0, -1.0, 2.0, 0.5])
    return model


def _own_eager(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The model's own eager attention under another name: what it attends is recomputed, not read."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


@pytest.mark.parametrize("make", [_gemma2, _gpt_oss])
@pytest.mark.parametrize("implementation", ["eager", "own_eager"])
@alone_and_padded
def test_soft_caps_and_attention_sinks_count_in_the_statistics(make, implementation, padded, register_kernel):
    register_kernel("own_eager", _own_eager, eager_mask)
    ids, mask = batch(padded)
    model = make(implementation)
    cache = EvictingCache(model, H2O(), budget=ROOM)
    loop(model, cache, blocks_of(ids), mask, positions=True)
    uncapped = 0
    for layer, sums in enumerate(_column_sums(make("eager"), blocks_of(ids), mask)):
        expected = sums.unflatten(1, (KV_HEADS, HEADS // KV_HEADS)).mean(2)
        scores = cache.evicting_layers[layer].state["score"][:, :, : expected.shape[-1]]
        assert (scores - expected).abs().max() < FP32
        uncapped += int(make is _gpt_oss and float(scores.sum()) < 0.95 * float(KV_HEADS * sum(BLOCKS) * len(ids)))
    assert make is _gemma2 or uncapped  # the sinks really take a share


@pytest.mark.parametrize("make", [_gemma2, _gpt_oss])
@pytest.mark.parametrize("implementation", ["eager", "own_eager"])
@alone_and_padded
def test_models_with_soft_caps_and_attention_sinks_equal_the_reference(make, implementation, padded, register_kernel):
    register_kernel("own_eager", _own_eager, eager_mask)
    ids, mask = batch(padded)
    model = make(implementation)
    got, held = testing.run(model, EvictingCache(model, "h2o", budget=BUDGET), blocks_of(ids), mask)
    expected = testing.replay(make("eager"), held, blocks_of(ids), mask)
    assert largest_error(got, expected, blocks_of(ids), mask) < 5 * NOISE


@alone_and_padded
def test_a_flat_mask_kernel_with_attention_sinks_keeps_them_or_is_refused(padded, register_kernel):
    """Where a mask per head is needed, the stand-in for the kernel must not forget the sinks."""
    register_kernel("flat_masks", _flashlike, flash_attention_mask)
    ids, mask = batch(padded)
    model = _gpt_oss("flat_masks")
    error = 0.0
    with contextlib.suppress(ObservationError, UnsupportedModelError):
        got, held = testing.run(model, EvictingCache(model, "h2o", budget=BUDGET), blocks_of(ids), mask)
        expected = testing.replay(_gpt_oss("eager"), held, blocks_of(ids), mask)
        error = largest_error(got, expected, blocks_of(ids), mask)
    assert error < 5 * NOISE


# -- the rows themselves -------------------------------------------------------------------------------------------


def _naive(query, keys, mask, scaling, softcap, sinks):
    """Softmax rows of all queries, (B, heads, Q, L), one at a time."""
    rows, heads, queries, _ = query.shape
    group = heads // keys.shape[1]
    slots = keys.shape[2]
    weights = torch.zeros(rows, heads, queries, slots)
    for b in range(rows):
        for h in range(heads):
            for q in range(queries):
                logits = []
                for s in range(slots):
                    shown = s <= slots - queries + q if mask is None else bool(mask[b, h % mask.shape[1], q, s])
                    value = float(query[b, h, q].double() @ keys[b, h // group, s].double()) * scaling
                    value = value if softcap is None else softcap * math.tanh(value / softcap)
                    logits.append(value if shown else -math.inf)
                top = max(logits)
                if top == -math.inf:
                    continue
                total = sum(math.exp(x - top) for x in logits)
                total += 0 if sinks is None else math.exp(float(sinks[h]) - top)
                weights[b, h, q] = torch.tensor([math.exp(x - top) / total for x in logits])
    return weights


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("masked", [None, "shared", "per-head", "float", "-inf"])
@pytest.mark.parametrize(("queries", "last"), [(7, 7), (7, 3), (1, 1), (5, 50)])
def test_rows_equal_a_naive_softmax(softcap, with_sinks, masked, queries, last):
    query, keys = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 11, 8)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    mask = None
    if masked is not None:
        mask = torch.rand(2, 4 if masked == "per-head" else 1, queries, 11) > 0.4
        mask[0, :, 0] = False  # a pad's row
    given = mask
    if masked == "float":
        given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if masked == "-inf":
        given = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    expected = _naive(query, keys, mask, 0.3, softcap, sinks)
    first = max(0, queries - last)
    got = torch.zeros(2, 2, 2, queries - first, 11)
    for start, weights in attention_rows(query, keys, given, scaling=0.3, last=last, softcap=softcap, sinks=sinks):
        got[:, :, :, start - first : start - first + weights.shape[3], : weights.shape[4]] = weights
    torch.testing.assert_close(got.flatten(1, 2), expected[:, :, first:], rtol=0, atol=1e-6)


def test_rows_come_in_blocks_that_together_are_all_queries():
    query, keys = torch.randn(1, 4, 3 * CPU_BLOCK + 5, 8), torch.randn(1, 2, 3 * CPU_BLOCK + 9, 8)
    starts, whole = [], torch.zeros(1, 4, query.shape[2], keys.shape[2])
    for start, weights in attention_rows(query, keys, None, scaling=0.3, last=query.shape[2]):
        starts.append(start)
        flat = weights.flatten(1, 2)
        whole[:, :, start : start + flat.shape[2], : flat.shape[3]] = flat
    assert starts == [0, CPU_BLOCK, 2 * CPU_BLOCK, 3 * CPU_BLOCK]
    shown = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool).tril(4)
    logits = query @ keys.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    torch.testing.assert_close(whole, logits.masked_fill(~shown, -torch.inf).softmax(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("threads", "heads"), [(1, 3), (2, 3), (2, 5), (3, 4), (3, 1)])
def test_rows_and_outputs_do_not_depend_on_how_threads_share_them(threads, heads, masked):
    """With several threads and too few heads for them, a block's rows are cut; the last block is shorter."""
    queries = 2 * CPU_BLOCK + 3
    query, keys = torch.randn(1, 2 * heads, queries, 8), torch.randn(1, heads, queries, 8)
    values = torch.randn(1, heads, queries, 8)
    shown = torch.ones(queries, queries, dtype=torch.bool).tril()
    if masked:
        shown &= torch.rand(queries, queries) > 0.3
        shown[7] = False
    whole, output = torch.zeros(2 * heads, queries, queries), torch.empty(1, queries, 2 * heads, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        blocks = attention_rows(
            query, keys, shown[None, None] if masked else None, scaling=0.3, last=queries, values=values, output=output
        )
        for start, weights in blocks:
            whole[:, start : start + weights.shape[3], : weights.shape[4]] = weights.flatten(1, 2)[0]
    finally:
        torch.set_num_threads(before)
    logits = query[0] @ keys[0].repeat_interleave(2, 0).transpose(-1, -2) * 0.3
    expected = logits.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num()
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)
    attended = expected @ values[0].repeat_interleave(2, 0)
    torch.testing.assert_close(output[0].transpose(0, 1), attended, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_row_depends_on_a_later_key(bad):
    query, keys = torch.randn(1, 2, 20, 8), torch.randn(1, 1, 20, 8)
    ((_, clean),) = [(a, w.clone()) for a, w in attention_rows(query, keys, None, scaling=0.3, last=20)]
    keys[:, :, 15] = bad
    ((_, weights),) = attention_rows(query, keys, None, scaling=0.3, last=20)
    assert torch.equal(weights[..., :15, :], clean[..., :15, :])
    assert not torch.equal(weights[..., 15:, :], clean[..., 15:, :])


def test_long_prompts_have_fewer_queries_per_block_on_a_cpu():
    assert statistics.block_queries(9, 1024, torch.device("cpu")) == CPU_BLOCK
    assert statistics.block_queries(9, 8192, torch.device("cpu")) == CPU_BLOCK // 2
    assert statistics.block_queries(32, 10**6, torch.device("cpu")) == 16
    assert statistics.block_queries(32, 10**6, torch.device("cuda")) == statistics.BLOCK


def test_rows_of_half_precision_tensors_are_float32():
    query, keys = torch.randn(1, 4, 3, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    ((_, weights),) = attention_rows(query, keys, None, scaling=0.3, last=3)
    assert weights.dtype == torch.float32
    expected = _naive(query.float(), keys.float(), None, 0.3, None, None)
    torch.testing.assert_close(weights.flatten(1, 2), expected, rtol=0, atol=1e-6)


def test_generating_on_a_prepared_model_equals_generating_before():
    model = tiny()
    ids = text(len(LENGTHS), PROMPT)
    before = generate(model, ids, plain(model), torch.ones_like(ids)).sequences
    EvictingCache(model, "adaptive_ema", budget=BUDGET)
    assert torch.equal(generate(model, ids, plain(model), torch.ones_like(ids)).sequences, before)
