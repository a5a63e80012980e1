"""What every policy promises, over every registered one: exact with room, exact after eviction, never over budget."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from helpers import (
    BLOCKS,
    BUDGET,
    HEADS,
    LAYERS,
    LENGTHS,
    NOISE,
    PROMPT,
    RENAMED,
    VOCABULARY,
    alone_and_padded,
    batch,
    blocks_of,
    deprecated_name,
    every_implementation,
    every_policy,
    forward,
    generate,
    kept,
    largest_error,
    loop,
    plain,
    real,
    sharpened,
    small,
    text,
    tiny,
)
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvevict import EvictingCache, Held, ObservationError, OptionError, host, testing
from kvevict.layer import EvictingLayer
from kvevict.policies import H2O, Policy, PyramidKV, Random, Scissorhands

DTYPES = [torch.float32, torch.bfloat16]
ROOM = 64
"""A budget that nothing outgrows."""

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


# -- with room for everything: identical to DynamicCache -----------------------------------------------------------


@functools.cache
def _generated_in_full(implementation: str, dtype: torch.dtype, padded: bool) -> Any:
    model = tiny(implementation, dtype)
    ids, mask = batch(padded, PROMPT)
    return generate(model, ids, plain(model), mask)


def _assert_identical(got: Any, expected: Any) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(expected.logits)
    for one, other in zip(got.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


@every_policy
@every_implementation
@every_dtype
@alone_and_padded
def test_with_room_generate_by_the_old_argument_is_identical_to_dynamic_cache(name, implementation, dtype, padded):
    model = tiny(implementation, dtype)
    ids, mask = batch(padded, PROMPT)
    cache = EvictingCache(model, small(name), budget=ROOM)
    with deprecated_name():
        got = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False,
                             return_dict_in_generate=True, output_logits=True)  # fmt: skip  # one call
    _assert_identical(got, _generated_in_full(implementation, dtype, padded))
    assert cache.get_seq_length() == PROMPT + 7


@pytest.mark.skipif(not RENAMED, reason="the argument `cache` came with transformers 5.23")
@every_policy
@every_implementation
@every_dtype
@alone_and_padded
def test_with_room_generate_is_identical_to_dynamic_cache(name, implementation, dtype, padded):
    model = tiny(implementation, dtype)
    ids, mask = batch(padded, PROMPT)
    cache = EvictingCache(model, small(name), budget=ROOM)
    got = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=8, do_sample=False,
                         return_dict_in_generate=True, output_logits=True)  # fmt: skip  # one call
    _assert_identical(got, _generated_in_full(implementation, dtype, padded))
    assert [layer.get_seq_length() for layer in cache.layers] == [PROMPT + 7] * LAYERS


@functools.cache
def _looped_in_full(implementation: str, dtype: torch.dtype, padded: bool, positions: bool) -> list[Tensor]:
    model = tiny(implementation, dtype)
    ids, mask = batch(padded)
    return loop(model, plain(model), blocks_of(ids), mask, positions)


@every_policy
@every_implementation
@every_dtype
@alone_and_padded
@pytest.mark.parametrize("positions", [False, True], ids=["no-position-ids", "position-ids"])
def test_with_room_a_hand_written_loop_is_identical_to_dynamic_cache(name, implementation, dtype, padded, positions):
    model = tiny(implementation, dtype)
    ids, mask = batch(padded)
    cache = EvictingCache(model, small(name), budget=ROOM)
    got = loop(model, cache, blocks_of(ids), mask, positions)
    done = 0
    for one, other, block in zip(
        got, _looped_in_full(implementation, dtype, padded, positions), blocks_of(ids), strict=True
    ):
        done += block.shape[1]
        shown = real(mask, block, done)
        assert torch.equal(one[shown], other[shown])
    assert cache.get_seq_length() == sum(BLOCKS)


@every_policy
def test_a_share_of_everything_keeps_everything(name):
    model = tiny()
    ids, mask = batch(True)
    cache = EvictingCache(model, small(name), budget=1.0)
    got = loop(model, cache, blocks_of(ids), mask)
    error = largest_error(got, _looped_in_full("sdpa", torch.float32, True, False), blocks_of(ids), mask)
    # PyramidKV gives early layers more than all tokens and late layers fewer
    assert error == 0 or name == "pyramidkv"


@pytest.mark.skipif(RENAMED, reason="this release knows the argument `cache`")
@pytest.mark.parametrize("name", ["h2o", "tova"])
@every_implementation
def test_an_argument_name_that_this_release_ignores_is_an_error(name, implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    with pytest.raises(ObservationError, match="ignores the argument 'cache'"):
        model(text(), cache=cache)


# -- after eviction: full attention under an explicit mask ---------------------------------------------------------


def _against_reference(
    policy: Policy, budget: int | float, implementation: str, padded: bool, dtype: torch.dtype = torch.float32
) -> tuple[float, EvictingCache]:
    model = tiny(implementation, dtype)
    ids, mask = batch(padded)
    cache = EvictingCache(model, policy, budget=budget)
    got, held = testing.run(model, cache, blocks_of(ids), mask)
    expected = testing.replay(tiny("eager", dtype), held, blocks_of(ids), mask)
    return largest_error(got, expected, blocks_of(ids), mask), cache


@every_policy
@every_implementation
@alone_and_padded
@pytest.mark.parametrize("budget", [BUDGET, 0.5])
def test_after_eviction_logits_equal_full_attention_under_an_explicit_mask(name, implementation, padded, budget):
    error, cache = _against_reference(small(name), budget, implementation, padded)
    assert error < NOISE
    assert name == "full" or max(cache.stored) < sum(BLOCKS)


@every_policy
@alone_and_padded
def test_in_half_precision_logits_still_equal_the_reference(name, padded):
    error, _ = _against_reference(small(name), BUDGET, "sdpa", padded, torch.bfloat16)
    # bfloat16 keeps 8 bits: three layers round logits of size 10 by about 0.05; a wrong mask moves them by 1 and more
    assert error < 0.5


@every_policy
@every_implementation
@alone_and_padded
@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({"protect_prompt": "whole", "recent": 1}, 26),
        ({"protect_prompt": 0.5, "recent": 1}, 12),
        ({"sinks": 2, "recent": 3}, 11),
    ],
    ids=["whole-prompt", "half-prompt", "sinks-and-recent"],
)
def test_protected_tokens_stay_and_logits_equal_the_reference(name, options, budget, implementation, padded):
    if options.get("protect_prompt") == "whole" and name == "pyramidkv":
        options = {**options, "beta": 1}  # equal shares: the last layer of a pointed pyramid cannot hold the prompt
    policy = small(name, **options)
    error, cache = _against_reference(policy, budget, implementation, padded)
    assert error < NOISE
    lengths = LENGTHS if padded else LENGTHS[:1]
    for layer, positions in enumerate(kept(cache)):
        own = policy.layer_budgets(budget, LAYERS, PROMPT)[layer]
        for row, length in enumerate(lengths):
            seen = length + sum(BLOCKS) - PROMPT
            must_stay = set(range(policy.sinks)) | set(range(seen - policy.recent_for(own), seen))
            if options.get("protect_prompt") == "whole":
                must_stay |= set(range(length))
            elif "protect_prompt" in options:
                head, tail = own // 2 // 2, own // 2 - own // 2 // 2
                must_stay |= set(range(min(head, length))) | set(range(max(0, length - tail), length))
            for head_positions in positions[row]:
                assert must_stay <= set(head_positions.tolist())


@pytest.mark.parametrize("rounding", ["exact", "authors"])
@every_implementation
@alone_and_padded
def test_layers_of_different_budgets_share_one_model(rounding, implementation, padded):
    error, cache = _against_reference(PyramidKV(window=3, kernel=3, rounding=rounding), BUDGET, implementation, padded)
    assert error < NOISE
    assert len(set(cache.stored)) > 1


@every_implementation
@pytest.mark.parametrize("prompt", [20, 21, 22, 23])
@pytest.mark.parametrize("turn", [2, 3])
def test_a_layer_whose_budget_grows_faster_than_the_text_leaves_no_gap_visible(prompt, turn, implementation):
    """Under a share, the pyramid's first layer gains two slots for a token: a freed slot may stay empty for a while."""
    sizes = [prompt, 1, turn, 1, 1, 1, turn, 1, turn, 1, 1]
    blocks = blocks_of(text(length=sum(sizes)), sizes)
    model = tiny(implementation)
    cache = EvictingCache(model, small("pyramidkv"), budget=0.5)
    got, held = testing.run(model, cache, blocks)
    assert largest_error(got, testing.replay(tiny("eager"), held, blocks), blocks) < NOISE


def test_layer_budgets_of_the_pyramid_sum_to_the_total():
    model = tiny(num_hidden_layers=5)
    for budget in range(4, 20):
        cache = EvictingCache(model, "pyramidkv", budget=budget, window=3, kernel=3)
        loop(model, cache, blocks_of(text(length=62), [60, 1, 1]))
        assert sum(cache.stored) == 5 * budget
        assert cache.stored == sorted(cache.stored, reverse=True)


def test_a_prompt_that_the_smallest_layer_cannot_protect_is_refused_and_never_cut():
    model = tiny()
    cache = EvictingCache(model, small("pyramidkv", protect_prompt="whole", recent=1), budget=26)
    with pytest.raises(OptionError, match="protect_prompt='whole'"):
        loop(model, cache, blocks_of(text(length=40), [PROMPT] + [1] * 20))


@pytest.mark.parametrize("options", [{"group": "max"}, {"group": "sum"}, {"group": "first"}])
def test_every_group_reduction_is_exact(options):
    assert _against_reference(H2O(**options), BUDGET, "sdpa", True)[0] < NOISE


# -- the reference can fail ----------------------------------------------------------------------------------------


def _recorded(padded: bool) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor], Tensor | None]:
    model = tiny()
    ids, mask = batch(padded)
    got, held = testing.run(model, EvictingCache(model, "h2o", budget=BUDGET), blocks_of(ids), mask)
    return got, held, blocks_of(ids), mask


@alone_and_padded
def test_the_reference_sees_one_wrong_token_in_one_head_of_one_layer(padded):
    got, held, blocks, mask = _recorded(padded)
    wrong = [[positions.clone() for positions in layers] for layers in held]
    last = wrong[-1][1][0, 1]  # last forward, middle layer, first row, second head
    evicted = next(p for p in range(int(last.max())) if p not in last.tolist())
    last[0] = evicted
    error = largest_error(got, testing.replay(tiny("eager"), wrong, blocks, mask), blocks, mask)
    assert error > 100 * NOISE


def test_the_reference_sees_a_future_token():
    got, held, blocks, mask = _recorded(False)
    turn = BLOCKS.index(6)
    seen = sum(BLOCKS[:turn])
    peeking = [[positions.clone() for positions in layers] for layers in held]
    model = tiny()
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    loop(model, cache, blocks[:turn])
    ahead = [forward(model, cache, blocks[turn].flip(1))]  # the same turn with other tokens after the first
    assert seen == PROMPT + 3
    causal = (got[turn][:, :1] - ahead[0][:, :1]).abs().max()
    assert causal > 100 * NOISE  # another first token, other logits
    changed = blocks[turn].clone()
    changed[:, 1:] = (changed[:, 1:] + 1) % VOCABULARY
    replayed = testing.replay(tiny("eager"), peeking[: turn + 1], [*blocks[:turn], changed], mask)
    assert (replayed[-1][:, 0] - got[turn][:, 0]).abs().max() < NOISE  # the first token cannot see what changed
    assert (replayed[-1][:, 1] - got[turn][:, 1]).abs().max() > 100 * NOISE


@every_policy
@every_implementation
def test_no_token_of_a_turn_sees_a_later_one(name, implementation):
    model = tiny(implementation)
    ids = text()
    turn = BLOCKS.index(6)
    blocks = blocks_of(ids)[: turn + 1]
    changed = blocks[turn].clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % VOCABULARY
    got, other = (
        loop(model, EvictingCache(model, small(name), budget=BUDGET), [*blocks[:turn], last])[-1]
        for last in (blocks[turn], changed)
    )
    assert torch.equal(got[:, :3], other[:, :3])
    assert (got[:, 3:] - other[:, 3:]).abs().amax(-1).min() > 100 * NOISE


# -- what is held --------------------------------------------------------------------------------------------------


def _own_budget(policy: Policy, budget: int | float, layer: int, seen: int, prompt: int) -> int:
    """Tokens that one layer may keep of one row: the README's words, not the library's code."""
    if not policy.evicts:
        return seen
    average = budget if isinstance(budget, int) else max(int(Fraction(repr(budget)) * seen), policy.least())
    if seen <= average:
        return seen
    return policy.layer_budgets(average, LAYERS, prompt)[layer]


@every_policy
@every_implementation
@alone_and_padded
@pytest.mark.parametrize("budget", [BUDGET, 0.5])
@pytest.mark.parametrize("sinks", [0, 2])
def test_what_is_held_after_each_forward(name, implementation, padded, budget, sinks):
    policy = small(name) if sinks == 0 else small(name, sinks=sinks, recent=1)
    model = tiny(implementation)
    ids, mask = batch(padded)
    cache = EvictingCache(model, policy, budget=budget)
    lengths = [length - PROMPT for length in LENGTHS] if padded else [0]
    before: list[list[list[set[int]]]] = [[[set() for _ in range(2)] for _ in lengths] for _ in range(LAYERS)]
    done = 0
    for block in blocks_of(ids):
        forward(model, cache, block, None if mask is None else mask[:, : done + block.shape[1]], positions=True)
        arrived = {row: max(0, done + missing) for row, missing in enumerate(lengths)}
        done += block.shape[1]
        assert [layer.get_seq_length() for layer in cache.layers] == [done] * LAYERS
        assert cache.get_seq_length() == done
        for index, positions in enumerate(kept(cache)):
            assert positions.dtype == torch.int64
            assert positions.shape[:2] == (len(lengths), 2)
            assert torch.equal(positions, cache.kept_positions(index))
            for row, missing in enumerate(lengths):
                seen = done + missing
                most = _own_budget(policy, budget, index, seen, PROMPT + missing)
                for head in range(2):
                    held = positions[row, head].tolist()
                    live = [p for p in held if p >= 0]
                    assert held == live + [-1] * (len(held) - len(live))  # -1 only at the end
                    assert live == sorted(set(live))
                    old = before[index][row][head]
                    many = len(old) + seen - arrived[row]
                    if many > most:  # Scissorhands drops half of its budget at once, others no more than they must
                        protected = policy.protected_tokens(most, PROMPT + missing)
                        many = min(most, max(many - int(policy.at_once(most)), protected))
                    assert len(live) == many
                    assert set(live) <= old | set(range(arrived[row], seen))  # the evicted never come back
                    assert set(range(min(policy.sinks, seen))) <= set(live)
                    before[index][row][head] = set(live)
            counted = int((positions >= 0).sum(-1).max())
            stored = cache.stored[index]
            assert counted == positions.shape[-1]
            assert stored == counted if not padded else stored >= counted
    assert name == "full" or max(cache.stored) < done


def test_a_slot_left_empty_does_not_count_among_those_that_stay():
    """One slot is freed at the second forward and passed over by the third, which then drops a whole budget at once."""
    model = tiny()
    cache = EvictingCache(model, Scissorhands(recent=10, drop=1.0, window=12), budget=0.5)
    loop(model, cache, blocks_of(text(length=41), [20, 1, 20]))
    assert [positions[0, 0].tolist() for positions in kept(cache)] == [list(range(31, 41))] * LAYERS


@dataclass(frozen=True, kw_only=True)
class Opinions(Policy):
    """The first two layers would rather lose token 5, the last one token 7; otherwise the oldest goes."""

    name: ClassVar[str] = "opinions"
    consensus: ClassVar[bool] = True

    def score(self, held: Held) -> Tensor:
        return held.positions.masked_fill(held.positions == (5 if held.layer < 2 else 7), -5)


@every_implementation
@alone_and_padded
def test_with_consensus_the_token_with_most_votes_goes_from_all_layers(implementation, padded):
    model = tiny(implementation)
    cache = EvictingCache(model, Opinions(), budget=BUDGET)
    ids, mask = text(2, 11), torch.ones(2, 11, dtype=torch.long)
    if padded:
        mask[1, :1] = 0
    forward(model, cache, ids[:, :10], mask[:, :10], positions=True)
    once = [[0, 1, 2, 3, 4, 6, 7, 8, 9]] * 2
    # the padded row has nine tokens so far: nothing had to go
    other = [[0, 1, 2, 3, 4, 5, 6, 7, 8]] * 2 if padded else once
    assert [positions.tolist() for positions in kept(cache)] == [[once, other]] * LAYERS
    forward(model, cache, ids[:, 10:], mask, positions=True)
    twice = [[1, 2, 3, 4, 6, 7, 8, 9, 10]] * 2
    assert [positions.tolist() for positions in kept(cache)] == [[twice, once if padded else twice]] * LAYERS


@every_policy
@every_implementation
@alone_and_padded
def test_the_first_generated_token_is_the_full_caches(name, implementation, padded):
    model = tiny(implementation)
    ids, mask = batch(padded, PROMPT)
    got = generate(model, ids, EvictingCache(model, small(name), budget=BUDGET), mask, new=3)
    full = _generated_in_full(implementation, torch.float32, padded)
    assert torch.equal(got.logits[0], full.logits[0])
    if name != "full":
        assert not torch.equal(got.logits[1], full.logits[1])


@every_policy
@every_implementation
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_fed_in_chunks_no_more_than_budget_and_chunk_is_ever_held(name, implementation, chunk, monkeypatch):
    if name == "full":
        pytest.skip("full never evicts")
    model = tiny(implementation)
    attended: dict[int, list[int]] = {}
    update = EvictingLayer.update

    def watched(self, key_states, value_states, *args, **kwargs):
        keys, values = update(self, key_states, value_states, *args, **kwargs)
        assert keys.shape[2] == self.slots
        attended.setdefault(self.index, []).append(int((self.slot_positions >= 0).sum(-1).max()))
        return keys, values

    monkeypatch.setattr(EvictingLayer, "update", watched)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, cache, text(length=40).split(chunk, 1))
    budgets = cache.policy.layer_budgets(BUDGET, LAYERS, 40)
    for index, lengths in attended.items():
        assert len(lengths) == -(-40 // chunk)
        assert max(lengths) <= max(budgets[index], BUDGET) + chunk
    assert max(cache.stored) <= max(budgets)


@every_policy
def test_chunked_prefill_of_generate_evicts_after_each_chunk(name):
    model = tiny()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    generate(model, text(length=PROMPT), cache, new=3, prefill_chunk_size=6)
    by_hand = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, by_hand, blocks_of(text(length=PROMPT), [6, 6, 6, 2]))
    assert cache.get_seq_length() == PROMPT + 2
    for after, cut in zip(kept(cache), kept(by_hand), strict=True):
        old = after[(after >= 0) & (after < PROMPT)].unique()
        assert set(old.tolist()) <= set(cut.unique().tolist())


@every_policy
@alone_and_padded
def test_a_second_generate_continues_where_the_first_stopped(name, padded):
    model = tiny()
    ids, mask = batch(padded, PROMPT)
    mask = torch.ones_like(ids) if mask is None else mask  # without one, generate() takes every token 0 for a pad
    cache = EvictingCache(model, small(name), budget=BUDGET)
    first = generate(model, ids, cache, mask, new=4).sequences
    turn = torch.cat([first, text(first.shape[0], 6, seed=5)], 1)
    longer = torch.cat([mask, mask.new_ones(mask.shape[0], 10)], 1)
    got = generate(model, turn, cache, longer, new=4)
    assert cache.get_seq_length() == PROMPT + 4 + 6 + 3
    by_hand = EvictingCache(model, small(name), budget=BUDGET)
    sizes = [PROMPT, 1, 1, 1, 7, 1, 1, 1]  # the last token of a generation was never fed
    logits = loop(model, by_hand, blocks_of(got.sequences[:, :-1], sizes),
                  torch.cat([longer, longer.new_ones(longer.shape[0], 3)], 1), positions=True)  # fmt: skip  # one call
    for step, one in enumerate(got.logits):
        assert (one - logits[4 + step][:, -1]).abs().max() < NOISE
    for one, other in zip(kept(cache), kept(by_hand), strict=True):
        assert torch.equal(one, other)


# -- other models --------------------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": HEADS,
         "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 16}  # fmt: skip  # one shape


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64))


def _gpt_neox() -> Any:
    options = {key: SHAPE[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    return GPTNeoXForCausalLM(GPTNeoXConfig(num_attention_heads=HEADS, **options))


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 4}, layer_types=kinds, sliding_window=5)
    return Gemma3ForCausalLM(config)


OTHERS = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=0)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "gemma3": _gemma3,
}


def _other(kind: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model = sharpened(OTHERS[kind]())
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("kind", OTHERS)
@every_implementation
@pytest.mark.parametrize("name", ["streaming_llm", "random", "h2o", "snapkv", "pyramidkv", "adaptive_ema"])
@alone_and_padded
def test_other_models_equal_the_reference(kind, implementation, name, padded):
    model = _other(kind, implementation)
    ids, mask = batch(padded)
    blocks = blocks_of(ids)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    got, held = testing.run(model, cache, blocks, mask)
    expected = testing.replay(_other(kind, "eager"), held, blocks, mask)
    assert largest_error(got, expected, blocks, mask) < 5 * NOISE  # Gemma's and GPT-2's logits are larger
    assert max(cache.stored) < sum(BLOCKS)


@pytest.mark.parametrize("kind", OTHERS)
@every_implementation
@alone_and_padded
def test_other_models_with_room_are_identical_to_dynamic_cache(kind, implementation, padded):
    model = _other(kind, implementation)
    ids, mask = batch(padded, PROMPT)
    full = generate(model, ids, plain(model), mask)
    _assert_identical(generate(model, ids, EvictingCache(model, "h2o", budget=ROOM), mask), full)
    model = _other(kind, implementation)
    _assert_identical(generate(model, ids, EvictingCache(model, Random(), budget=ROOM), mask), full)


def test_sliding_layers_stay_what_transformers_makes_them():
    model = _other("gemma3", "sdpa")
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    host_layers = DynamicCache(config=host.decoder_config(model)).layers
    assert [type(layer) for layer in cache.layers[::2]] == [type(layer) for layer in host_layers[::2]]
    assert [type(layer) for layer in cache.layers[1::2]] == [EvictingLayer] * 2
    loop(model, cache, blocks_of(text()))
    assert [layer.keys.shape[2] for layer in cache.layers[::2]] == [4, 4]  # window 5, less the next token
    assert cache.stored == [BUDGET, BUDGET]
    with pytest.raises(ValueError, match=r"layers that evict are \[1, 3\]"):
        cache.kept_positions(0)
