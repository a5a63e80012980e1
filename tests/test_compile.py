"""A compiled forward decodes as the uncompiled one does, in one graph, and is compiled once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build
from helpers import (
    BUDGET,
    NOISE,
    PROMPT,
    batch,
    blocks_of,
    forward,
    generate,
    kept,
    loop,
    small,
    text,
    tiny,
)
from torch import Tensor
from torch import _dynamo as dynamo
from transformers import GptOssConfig, GptOssForCausalLM, StaticCache

from kvevict import EvictingCache, ObservationError, PolicyError, WrongModelError, compiled, detach, host
from kvevict.errors import UnsupportedOperationError
from kvevict.policies import Policy

BACKEND = "aot_eager"
"""It traces as the default backend does, without compiling kernels for a minute."""


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def compile_forward(model: Any, **options: Any) -> None:
    """As transformers' documentation says, before the cache is built."""
    model.forward = torch.compile(model.forward, backend=BACKEND, **options)


def graphs() -> int:
    return int(dynamo.utils.counters["stats"]["unique_graphs"])


def breaks() -> int:
    return sum(dynamo.utils.counters["graph_break"].values())


def same(one: EvictingCache, other: EvictingCache) -> bool:
    return all(torch.equal(*pair) for pair in zip(kept(one), kept(other), strict=True))


@pytest.mark.parametrize("name", ["full", "h2o", "adaptive_ema", "snapkv", "streaming_llm", "key_norm"])
def test_a_forward_is_one_graph_and_sizes_are_compiled_once(name):
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    blocks = [text(length=PROMPT), *text(length=12, seed=3).split(1, 1)]
    expected = EvictingCache(plain, small(name), budget=BUDGET)
    compile_forward(model, fullgraph=True)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    done = []
    for block in blocks:
        assert (forward(model, cache, block) - forward(plain, expected, block)).abs().max() < NOISE
        done.append(graphs())
    assert done[0] > 0 and breaks() == 0
    assert len(set(done[3:])) == 1, "the third step and the later ones are compiled already"
    assert same(cache, expected)
    if small(name).stacks:
        assert all(type(layer.steady).__name__ == "Member" for layer in cache.layers), "the state of fast steps"


@pytest.mark.parametrize("padded", [False, True], ids=["alone", "padded"])
def test_turns_and_padded_rows_in_one_graph(padded):
    ids, mask = batch(padded)
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    expected = EvictingCache(plain, "h2o", budget=BUDGET)
    logits = loop(plain, expected, blocks_of(ids), mask, positions=True)
    compile_forward(model, fullgraph=True)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    got = loop(model, cache, blocks_of(ids), mask, positions=True)
    done = 0
    for ours, theirs in zip(got, logits, strict=True):
        differs = (ours - theirs).abs().amax(-1)
        if mask is not None:
            differs = differs * mask[:, done : done + ours.shape[1]]
        done += ours.shape[1]
        assert differs.max() < NOISE
    assert same(cache, expected)


def test_a_mask_that_hides_nothing_keeps_nobody_from_fast_steps():
    """A forward that is traced cannot look at it, and so transformers makes one of four dimensions."""
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    blocks = [text(length=PROMPT), *text(length=4, seed=3).split(1, 1)]
    ones = torch.ones(1, PROMPT + 4, dtype=torch.long)
    expected = loop(plain, EvictingCache(plain, "h2o", budget=BUDGET), blocks, ones)
    compile_forward(model, fullgraph=True)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    for ours, theirs in zip(loop(model, cache, blocks, ones), expected, strict=True):
        assert (ours - theirs).abs().max() < NOISE
    assert all(type(layer.steady).__name__ == "Member" for layer in cache.layers)


def test_caches_share_the_graphs():
    model = tiny(num_hidden_layers=2)
    compile_forward(model, fullgraph=True)
    blocks = [text(length=PROMPT), *text(length=4, seed=3).split(1, 1)]
    done = []
    for _ in range(4):
        loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks)
        done.append(graphs())
    assert done[1:] == [done[1]] * 3, "the second one shows that the cache may be another"


@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
@pytest.mark.parametrize("how", ["forward", "model.compile"])
def test_generate_with_a_compiled_model(how, name):
    ids = text(length=PROMPT)
    plain, model = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    if how == "forward":
        compile_forward(model)
    else:
        model.compile(backend=BACKEND)
    expected, cache = (EvictingCache(each, name, budget=BUDGET) for each in (plain, model))
    assert torch.equal(generate(model, ids, cache).sequences, generate(plain, ids, expected).sequences)
    assert graphs() > 0 and breaks() == 0
    assert [type(each.steady) for each in cache.layers] == [type(each.steady) for each in expected.layers]
    assert same(cache, expected)


def test_the_wrapper_that_torch_compile_makes_is_as_good_as_the_model():
    plain, model = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    blocks = [text(length=PROMPT), *text(length=3, seed=3).split(1, 1)]
    wrapper = torch.compile(model, backend=BACKEND, fullgraph=True)
    before = type(model.model.layers[0].self_attn.config)
    expected, cache = EvictingCache(plain, "random", budget=BUDGET), EvictingCache(wrapper, "random", budget=BUDGET)
    for ours, theirs in zip(loop(wrapper, cache, blocks), loop(plain, expected, blocks), strict=True):
        assert (ours - theirs).abs().max() < NOISE
    assert graphs() > 0 and same(cache, expected)
    assert forward(model, cache, blocks[-1]).isfinite().all(), "it is the model's own cache"
    detach(wrapper)
    assert type(model.model.layers[0].self_attn.config) is before


def test_compiled_and_uncompiled_forwards_take_turns():
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    blocks = [text(length=PROMPT), *text(length=6, seed=3).split(1, 1)]
    expected, cache = EvictingCache(plain, "h2o", budget=BUDGET), EvictingCache(model, "h2o", budget=BUDGET)
    step = torch.compile(model.forward, backend=BACKEND, fullgraph=True)
    for index, block in enumerate(blocks):
        if index % 2:
            with torch.no_grad():
                got = step(block, use_cache=True, **{host.cache_argument(model): cache}).logits
        else:
            got = forward(model, cache, block)
        assert (got - forward(plain, expected, block)).abs().max() < NOISE
    assert graphs() > 0 and same(cache, expected)


def test_a_function_may_hold_several_forwards_and_ask_what_is_held():
    """Whatever comes after the first forward must know where it stopped."""
    model = tiny(num_hidden_layers=2)
    tokens = text(length=2, seed=3).split(1, 1)

    def steps(cache: EvictingCache) -> tuple[Any, ...]:
        logits = [forward(model, cache, token) for token in tokens]
        return torch.cat(logits), cache.get_seq_length(), cache.stored, cache.kept_positions(1)

    told = []
    for run in (steps, torch.compile(steps, backend=BACKEND)):
        cache = EvictingCache(model, "h2o", budget=BUDGET)
        forward(model, cache, text(length=PROMPT))
        told.append(run(cache))
    (logits, *expected, held), (ours, *got, ours_held) = told
    assert got == expected == [PROMPT + 2, [BUDGET] * 2]
    assert (ours - logits).abs().max() < NOISE and torch.equal(ours_held, held)


def test_a_copy_and_a_loaded_cache_go_on_by_themselves(tmp_path):
    model = tiny(num_hidden_layers=2)
    compile_forward(model)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    loop(model, cache, [text(length=PROMPT), text(length=1)])
    copied = copy.deepcopy(cache)
    cache.save(tmp_path)
    loaded = EvictingCache.load(model, tmp_path)
    tokens = text(length=3, seed=4).split(1, 1)
    first, *others = [torch.stack(loop(model, each, tokens)) for each in (copied, loaded, cache)]
    assert all((first - each).abs().max() < NOISE for each in others)
    assert cache.get_seq_length() == copied.get_seq_length() == PROMPT + 4


def test_other_caches_of_a_prepared_model_compile_whole():
    model = tiny(num_hidden_layers=2)
    ids = text(length=PROMPT + 1)
    alone = forward(model, StaticCache(config=model.config, max_cache_len=64), ids)
    EvictingCache(model, "h2o", budget=BUDGET)
    compile_forward(model, fullgraph=True)
    got = forward(model, StaticCache(config=model.config, max_cache_len=64), ids)
    assert (got - alone).abs().max() < NOISE


@pytest.mark.parametrize("name", ["h2o", "random"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_where_a_graph_is_interrupted_decoding_is_compiled_once_too(name, implementation):
    """Eager attention, and policies that need no attention where the cache does not know that the model is compiled."""
    model = tiny(implementation, num_hidden_layers=2)
    ids = text(length=PROMPT + 8)
    plain, cache = (EvictingCache(model, small(name), budget=BUDGET) for _ in range(2))
    for each in (plain, cache):
        forward(model, each, ids[:, :PROMPT])
    step = torch.compile(model.forward, backend=BACKEND)
    done = []
    for token in ids[:, PROMPT:].split(1, 1):
        with torch.no_grad():
            got = step(token, use_cache=True, **{host.cache_argument(model): cache}).logits
        assert (got - forward(model, plain, token)).abs().max() < NOISE
        done.append(graphs())
    assert done[0] > 0
    assert done[2:] == [done[1]] * 6  # the second step knows that sizes stay
    assert same(cache, plain)


def test_attention_with_learned_sinks_interrupts_the_graph():
    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=97, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip  # a model in a few lines
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    blocks = [text(length=PROMPT), *text(length=3, seed=3).split(1, 1)]
    expected = EvictingCache(model, "h2o", budget=BUDGET)
    logits = loop(model, expected, blocks)
    compile_forward(model)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    for ours, theirs in zip(loop(model, cache, blocks), logits, strict=True):
        assert (ours - theirs).abs().max() < NOISE
    assert breaks() > 0 and same(cache, expected)


def test_a_graph_may_end_between_an_update_and_its_attention(monkeypatch):
    model = tiny(num_hidden_layers=2)
    blocks = [text(length=PROMPT), *text(length=2, seed=3).split(1, 1)]
    expected, cache = (EvictingCache(model, "h2o", budget=BUDGET) for _ in range(2))
    logits = loop(model, expected, blocks)
    update = EvictingCache.update

    def interrupted(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        held = update(*args, **kwargs)
        dynamo.graph_break()
        return held

    monkeypatch.setattr(EvictingCache, "update", interrupted)
    compile_forward(model)
    for ours, theirs in zip(loop(model, cache, blocks), logits, strict=True):
        assert (ours - theirs).abs().max() < NOISE
    assert breaks() > 0 and same(cache, expected)


# torch itself looks at it when a graph is interrupted
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gradients_interrupt_the_graph():
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    compile_forward(model)
    ids, gradients = text(length=PROMPT), []
    for each in (model, plain):
        trained = each.requires_grad_(False).model.layers[0].self_attn.k_proj.weight.requires_grad_()
        cache = EvictingCache(each, "h2o", budget=BUDGET)
        each(ids, use_cache=True, **{host.cache_argument(each): cache}).logits.pow(2).mean().backward()
        gradients.append(trained.grad)
    assert breaks() > 0
    assert torch.allclose(*gradients, atol=1e-7) and gradients[0].any()


def test_a_model_that_drops_caches_of_long_texts_is_one_graph():
    """Phi-3 and its kin: whether generate() is about to do that is asked outside of graphs."""
    model = build("phi3")
    blocks = [text(length=PROMPT), *text(length=2, seed=3).split(1, 1)]
    expected = EvictingCache(model, "h2o", budget=BUDGET)
    logits = loop(model, expected, blocks)
    compile_forward(model, fullgraph=True)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    for ours, theirs in zip(loop(model, cache, blocks), logits, strict=True):
        assert (ours - theirs).abs().max() < NOISE
    assert same(cache, expected)


def test_a_mask_that_a_graph_wrote_over_is_looked_at_again():
    """Compiled code uses the memory of one mask for the next, of which Python sees nothing."""
    model = tiny(num_hidden_layers=2)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, cache, text(length=3))
    query, new = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
    mask = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    outputs = []
    for layer in (0, 1):
        outputs.append(compiled.attend(query, new, new, mask, cache.number, layer, 0.25, None))
        with torch._C._AutoDispatchBelowADInplaceOrView():  # no version is counted here
            mask[..., 1:3] = False
    alone = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, alone, text(length=3))
    for layer in (0, 1):
        alone.attend(layer, query, new, new, None if not layer else mask, scaling=0.25)
        held = (each.evicting_layers[layer].state["score"] for each in (cache, alone))
        torch.testing.assert_close(*held)


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [False, True])
def test_the_cache_of_another_model_is_refused(prepared):
    model, other = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    if prepared:
        EvictingCache(other, "h2o", budget=BUDGET)
    compile_forward(other)
    with pytest.raises(WrongModelError, match="build an EvictingCache for the model that uses it"):
        forward(other, cache, text(length=PROMPT))
    cache.reset()
    assert forward(model, cache, text(length=PROMPT)).isfinite().all()


def test_the_cache_of_another_model_does_not_go_unnoticed_where_one_layer_is_all_there_is():
    """Nothing asks the cache again before the forward is over."""
    model, other = tiny(num_hidden_layers=2), tiny(num_hidden_layers=1)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    compile_forward(other, fullgraph=True)
    assert forward(other, cache, text(length=PROMPT)).isnan().all()
    other.forward = other.forward.__wrapped__
    with pytest.raises(WrongModelError, match="layer 0 of a compiled forward did not attend"):
        forward(other, cache, text(length=1))
    cache.reset()
    assert forward(model, cache, text(length=PROMPT)).isfinite().all()


@pytest.mark.parametrize("begun", [False, True])
def test_another_attention_than_the_cache_was_built_for_is_refused(begun):
    model = tiny(num_hidden_layers=1)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    if begun:
        forward(model, cache, text(length=PROMPT))
    compile_forward(model)
    model.set_attn_implementation("eager")
    with pytest.raises(ObservationError, match="was 'sdpa' when this cache was built and is 'eager' now"):
        forward(model, cache, text(length=1))


def test_a_policys_error_comes_through():
    class Wrong(Policy):
        name = "wrong"
        queries = 1

        def score(self, held: Any) -> Tensor:
            return held.positions[:, :1, :1].float()

    model = tiny(num_hidden_layers=2)
    compile_forward(model)
    with pytest.raises(PolicyError, match="'wrong' scored layer 0"):
        forward(model, EvictingCache(model, Wrong(), budget=BUDGET), text(length=PROMPT))


def test_values_that_change_after_the_update_are_refused():
    model = tiny(num_hidden_layers=2)
    value = torch.zeros(1, 2, 1, 8)
    deferred = compiled.Deferred(EvictingCache(model, "h2o", budget=BUDGET), 0, value, value)
    deferred.check(model.model.layers[0].self_attn, value)
    with pytest.raises(UnsupportedOperationError, match="LlamaAttention changes the values"):
        deferred.check(model.model.layers[0].self_attn, value + 1)
