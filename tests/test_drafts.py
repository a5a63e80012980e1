"""Drafts: what was verified and taken back leaves nothing, and what stays equals decoding token by token."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import (
    BUDGET,
    HEADS,
    NAMES,
    NOISE,
    OBSERVING,
    PROMPT,
    VOCABULARY,
    alone_and_padded,
    blocks_of,
    by_position,
    forward,
    generate,
    kept,
    loop,
    ragged_mask,
    sharpened,
    small,
    text,
    tiny,
)
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvevict import EvictingCache, ObservationError, OptionError, UnsupportedOperationError
from kvevict.policies import PyramidKV, SnapKV

VOTED = ["adaptive_ema"]  # all layers decide together, so that no draft can be stepped through layer by layer
ALONE = [name for name in NAMES if name not in VOTED]
EXACT = [("sdpa", name) for name in ALONE] + [("eager", name) for name in ALONE if name not in OBSERVING]
every_exact = pytest.mark.parametrize(("implementation", "name"), EXACT)


def _repetitive(seed: int = 1) -> Tensor:
    """A prompt of 24 tokens whose continuation prompt lookup can guess."""
    return text(length=6, seed=seed).repeat(1, 4)


def _forwards(model: Any) -> tuple[list[int], Any]:
    """Tokens of each forward from now on, and the handle to remove."""
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes, handle


def _assert_same(one: EvictingCache, other: EvictingCache) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for left, right in zip(kept(one), kept(other), strict=True):
        assert torch.equal(left, right)
    for left, right in zip(by_position(one), by_position(other), strict=True):
        for name, column in left.items():
            torch.testing.assert_close(column, right[name], rtol=1e-4, atol=NOISE)


# -- generate() ----------------------------------------------------------------------------------------------------


@every_exact
@pytest.mark.parametrize("budget", [BUDGET, 0.5, 30, 100])
@pytest.mark.parametrize("seed", [1, 2])
def test_prompt_lookup_equals_plain_decoding(name, implementation, budget, seed):
    model, ids = tiny(implementation), _repetitive(seed)
    plain, drafted = (EvictingCache(model, small(name), budget=budget) for _ in range(2))
    expected = generate(model, ids, plain, new=25, return_dict_in_generate=False)
    sizes, handle = _forwards(model)
    got = generate(model, ids, drafted, new=25, return_dict_in_generate=False, prompt_lookup_num_tokens=4)
    handle.remove()
    assert torch.equal(got, expected)
    assert len(sizes) < 25 and max(sizes[1:]) > 1  # drafts were made, and some accepted
    if name != "key_norm":  # equal tokens have equally long keys in the first layer: rounding decides
        _assert_same(drafted, plain)


@pytest.mark.parametrize("name", ALONE)
def test_an_assistant_changes_nothing_but_the_number_of_forwards(name):
    model, ids = tiny(), text(length=PROMPT)
    assistant = tiny(num_hidden_layers=2)
    plain, drafted = (EvictingCache(model, small(name), budget=BUDGET) for _ in range(2))
    expected = generate(model, ids, plain, new=20, return_dict_in_generate=False)
    got = generate(model, ids, drafted, new=20, return_dict_in_generate=False, assistant_model=assistant)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(window=3, kernel=3, scores="prompt"),
        PyramidKV(window=3, kernel=3, rounding="authors"),
        small("h2o", protect_prompt=0.4),
        small("tova", protect_prompt="whole", recent=1),
        small("streaming_llm", sinks=2, recent=2),
    ],
    ids=lambda policy: policy.name,
)
def test_the_prompt_ends_where_the_first_draft_begins(policy):
    """The first forward brings both together."""
    model, ids = tiny(), _repetitive()
    plain, drafted = (EvictingCache(model, policy, budget=28) for _ in range(2))
    expected = generate(model, ids, plain, new=25, return_dict_in_generate=False)
    got = generate(model, ids, drafted, new=25, return_dict_in_generate=False, prompt_lookup_num_tokens=4)
    assert torch.equal(got, expected)
    _assert_same(drafted, plain)


@pytest.mark.parametrize(
    "policy",
    [
        small("h2o"),
        small("streaming_llm"),
        small("snapkv"),
        SnapKV(window=3, kernel=3, scores="prompt"),
        small("tova", protect_prompt=0.5),
    ],
    ids=lambda policy: policy.name,
)
def test_a_padded_prompt_may_be_looked_up_too(policy):
    model, ids = tiny(), torch.cat([text(length=5, seed=9), _repetitive()], 1)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    plain, drafted = (EvictingCache(model, policy, budget=BUDGET) for _ in range(2))
    expected = generate(model, ids, plain, mask, new=25, return_dict_in_generate=False)
    got = generate(model, ids, drafted, mask, new=25, return_dict_in_generate=False, prompt_lookup_num_tokens=4)
    assert torch.equal(got, expected)
    _assert_same(drafted, plain)


@pytest.mark.parametrize(
    "ids", [text(length=9, seed=6171), text(length=3, seed=6171).repeat(1, 3)], ids=["nine", "thrice"]
)
def test_slots_that_a_draft_emptied_are_not_kept_where_a_layers_budget_grows_by_leaps(ids):
    """The first layers of a pyramid get two more tokens at once of a share that grows by one."""
    model, assistant = tiny(), tiny()
    plain, drafted = (EvictingCache(model, small("pyramidkv"), budget=0.6) for _ in range(2))
    expected = generate(model, ids, plain, new=21)
    got = generate(model, ids, drafted, new=21, assistant_model=assistant)
    for one, other in zip(got.logits, expected.logits, strict=True):
        assert (one - other).abs().max() < NOISE
    _assert_same(drafted, plain)


@pytest.mark.parametrize("tokens", [5, 7])
@pytest.mark.parametrize("prompt", [5, 6])
def test_a_draft_that_outgrew_a_layers_budget_before_it_grew_is_stepped_through(prompt, tokens):
    """What an early token of the draft made the layer evict, later ones may not see, whatever room there is then."""
    model, ids = tiny(), text(length=prompt + 1 + tokens)
    drafted, single = (EvictingCache(model, small("pyramidkv"), budget=0.6) for _ in range(2))
    for cache in (drafted, single):
        loop(model, cache, blocks_of(ids[:, : prompt + 1], [prompt, 1]))
    drafted.activate_past_recording()
    logits = forward(model, drafted, ids[:, prompt + 1 :])
    drafted.crop(0)
    for step, token in enumerate(ids[:, prompt + 1 :].split(1, 1)):
        assert (logits[:, step] - forward(model, single, token)[:, 0]).abs().max() < NOISE
    _assert_same(drafted, single)


@pytest.mark.parametrize("pads", [1, 5])
@pytest.mark.parametrize("policy", [small("tova", protect_prompt=0.5), SnapKV(window=3, kernel=3, scores="prompt")],
                         ids=lambda policy: policy.name)  # fmt: skip  # one list
def test_a_padded_prompt_ends_where_a_draft_begins_that_came_with_it_and_stays(policy, pads):
    """The model is its own assistant, so that the first draft's first token is always right."""
    model, assistant = tiny(), tiny()
    ids = torch.cat([text(length=pads, seed=9), text(length=PROMPT)], 1)
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    plain, drafted = (EvictingCache(model, policy, budget=BUDGET) for _ in range(2))
    expected = generate(model, ids, plain, mask, new=12, return_dict_in_generate=False)
    sizes, handle = _forwards(model)
    got = generate(model, ids, drafted, mask, new=12, return_dict_in_generate=False, assistant_model=assistant)
    handle.remove()
    assert sizes[0] > pads + PROMPT and len(sizes) < 12  # the draft came with the prompt, and some tokens stayed
    assert torch.equal(got, expected)
    assert drafted.evicting_layers[0].row_prompt.tolist() == [PROMPT]
    _assert_same(drafted, plain)


@pytest.mark.parametrize("name", ["h2o", "random"])
@pytest.mark.parametrize("budget", [BUDGET, 100])
def test_sliding_layers_are_rolled_back_too(name, budget):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": HEADS,
             "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 16}  # fmt: skip  # one shape
    torch.manual_seed(0)
    model = sharpened(Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=kinds, sliding_window=5)))
    plain, drafted = (EvictingCache(model, small(name), budget=budget) for _ in range(2))
    expected = generate(model, _repetitive(), plain, new=20, return_dict_in_generate=False)
    got = generate(model, _repetitive(), drafted, new=20, return_dict_in_generate=False, prompt_lookup_num_tokens=4)
    assert torch.equal(got, expected)
    _assert_same(drafted, plain)
    # the next turn is no draft any more, in any layer
    more = [generate(model, torch.cat([expected, text(length=7)], 1), cache, new=5).sequences for cache in
            (plain, drafted)]  # fmt: skip  # one turn
    assert torch.equal(*more)
    _assert_same(drafted, plain)


@every_exact
def test_after_assisted_decoding_a_turn_is_attended_whole_and_cut_once_again(name, implementation):
    model, ids = tiny(implementation), text(length=PROMPT)
    plain, drafted = (EvictingCache(model, small(name), budget=BUDGET) for _ in range(2))
    expected = generate(model, ids, plain, new=6, no_repeat_ngram_size=1, return_dict_in_generate=False)
    got = generate(model, ids, drafted, new=6, no_repeat_ngram_size=1, return_dict_in_generate=False,
                   prompt_lookup_num_tokens=4, max_matching_ngram_size=1)  # fmt: skip  # one call
    assert torch.equal(got, expected)
    turn = torch.cat([expected, text(length=15, seed=5)], 1)
    one, other = (generate(model, turn, cache, new=8, no_repeat_ngram_size=1) for cache in (plain, drafted))
    assert torch.equal(one.sequences, other.sequences)
    for left, right in zip(one.logits, other.logits, strict=True):
        assert (left - right).abs().max() < NOISE
    assert drafted.stored == plain.stored
    assert not any(layer.record_past for layer in drafted.evicting_layers)


def test_a_cache_that_holds_tokens_is_refused_because_transformers_would_feed_them_again():
    model, ids = tiny(), _repetitive()
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, cache, ids[:, :-1])
    before = kept(cache)
    with pytest.raises(UnsupportedOperationError, match="second time"):
        generate(model, ids, cache, prompt_lookup_num_tokens=4)
    assert all(torch.equal(*pair) for pair in zip(before, kept(cache), strict=True))
    assert cache.get_seq_length() == 23


CANNOT = [
    ("eager", small("h2o"), "eager attention"),
    ("sdpa", small("adaptive_ema"), "all layers decide"),
    ("sdpa", small("streaming_llm", positions="cache"), "positions='cache'"),
]


@pytest.mark.parametrize(("implementation", "policy", "why"), CANNOT, ids=lambda value: getattr(value, "name", value))
def test_what_cannot_equal_plain_decoding_is_refused_once_it_would_evict(implementation, policy, why):
    model, ids = tiny(implementation), _repetitive()
    cache = EvictingCache(model, policy, budget=BUDGET)
    with pytest.raises(UnsupportedOperationError, match=why):
        generate(model, ids, cache, new=20, prompt_lookup_num_tokens=4)
    plain, drafted = (EvictingCache(model, policy, budget=100) for _ in range(2))
    expected = generate(model, ids, plain, new=20, return_dict_in_generate=False)
    got = generate(model, ids, drafted, new=20, return_dict_in_generate=False, prompt_lookup_num_tokens=4)
    assert torch.equal(got, expected)
    _assert_same(drafted, plain)


# -- a loop of one's own -------------------------------------------------------------------------------------------


def _filled(model: Any, name: str, padded: bool = False) -> tuple[EvictingCache, Tensor, Tensor | None]:
    """A cache that has evicted, the text, and its mask."""
    ids = text(3 if padded else 1, 40)
    mask = ragged_mask(40) if padded else None
    cache = EvictingCache(model, small(name), budget=BUDGET)
    loop(model, cache, blocks_of(ids[:, :23], [20, 1, 1, 1]), mask, positions=padded)
    return cache, ids, mask


@every_exact
@alone_and_padded
@pytest.mark.parametrize("accepted", range(6))
def test_a_shortened_draft_equals_its_accepted_tokens_one_by_one(name, implementation, padded, accepted):
    model = tiny(implementation)
    cache, ids, mask = _filled(model, name, padded)
    single = copy.deepcopy(cache)
    cache.activate_past_recording()
    until = None if mask is None else mask[:, :28]
    logits = forward(model, cache, ids[:, 23:28], until, positions=True)
    cache.crop(accepted - 5)
    for index in range(accepted):
        done = 24 + index
        own = forward(model, single, ids[:, done - 1 : done], None if mask is None else mask[:, :done], positions=True)
        assert (logits[:, index] - own[:, 0]).abs().max() < NOISE
    _assert_same(cache, single)
    assert cache.stored == single.stored
    rest = ids[:, 23 + accepted : 24 + accepted]
    until = None if mask is None else mask[:, : 24 + accepted]
    after = [forward(model, each, rest, until, positions=True) for each in (cache, single)]
    assert (after[0] - after[1]).abs().max() < NOISE


@every_exact
def test_a_draft_that_nobody_shortens_is_accepted_by_the_next_forward(name, implementation):
    model = tiny(implementation)
    cache, ids, _ = _filled(model, name)
    cropped = copy.deepcopy(cache)
    for each in (cache, cropped):
        each.activate_past_recording()
    for block in ids[:, 23:].split(4, 1):
        one = forward(model, cropped, block)
        cropped.crop(0)
        other = forward(model, cache, block)
        assert (one - other).abs().max() < NOISE
        assert max(cache.stored) <= max(cropped.stored) + 4
    cache.crop(0)
    _assert_same(cache, cropped)


@pytest.mark.parametrize("name", ["h2o", "random"])
def test_copies_and_files_of_an_open_draft_are_settled_and_leave_it_open(name, tmp_path):
    model = tiny()
    cache, ids, _ = _filled(model, name)
    cache.activate_past_recording()
    forward(model, cache, ids[:, 23:27])
    copied = copy.deepcopy(cache)
    assert max(copied.stored) <= BUDGET
    cache.save(tmp_path)
    unpickled = pickle.loads(pickle.dumps(cache)).attach(model)
    loaded = EvictingCache.load(model, tmp_path)
    cache.crop(-2)  # none of them ended the original's draft
    assert cache.get_seq_length() == 25
    forward(model, cache, ids[:, 25:27])
    cache.crop(0)
    for each in (copied, unpickled, loaded):
        _assert_same(cache, each)
    for each in (cache, copied):
        each.reset()
        assert not any(layer.record_past for layer in each.evicting_layers)


def test_more_than_the_newest_draft_is_not_taken_back_and_nothing_changes():
    model = tiny()
    cache, ids, _ = _filled(model, "h2o")
    cache.activate_past_recording()
    forward(model, cache, ids[:, 23:26])
    with pytest.raises(UnsupportedOperationError, match=r"crop\(-4\).*3 here"):
        cache.crop(-4)
    cache.crop(-2)
    assert cache.get_seq_length() == 24
    with pytest.raises(UnsupportedOperationError, match=r"crop\(-1\).*0 here"):
        cache.crop(-1)
    empty = EvictingCache(model, "random", budget=50)
    forward(model, empty, ids[:, :20])
    for each in (cache, empty, empty.layers[0]):  # policies that read no attention would take anything back
        with pytest.raises(OptionError, match=r"crop\(3\).*crop\(-3\)"):
            each.crop(3)
    assert empty.stored == [20] * 3


@pytest.mark.parametrize("name", ["full", "streaming_llm", "random", "key_norm"])
@alone_and_padded
def test_before_the_first_eviction_policies_that_read_no_attention_crop_like_any_cache(name, padded):
    model = tiny()
    ids, mask = text(3 if padded else 1, 40), ragged_mask(40) if padded else None
    cache, short = (EvictingCache(model, small(name), budget=50) for _ in range(2))
    loop(model, cache, blocks_of(ids[:, :26], [20, 1, 5]), mask, positions=True)
    loop(model, short, blocks_of(ids[:, :22], [20, 1, 1]), mask, positions=True)
    assert cache.is_croppable
    cache.crop(-4)
    _assert_same(cache, short)
    until = None if mask is None else mask[:, :25]
    after = [forward(model, each, ids[:, 22:25], until, positions=True) for each in (cache, short)]
    assert (after[0] - after[1]).abs().max() < NOISE


@pytest.mark.parametrize("name", [name for name in NAMES if name != "full"])
def test_without_recording_nothing_that_left_a_trace_is_taken_back(name):
    model = tiny()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    forward(model, cache, text(length=PROMPT))
    before = kept(cache)
    assert not cache.is_croppable
    with pytest.raises(NotImplementedError, match=r"crop\(-3\).*activate_past_recording"):
        cache.crop(-3)
    cache.crop(0)
    assert cache.get_seq_length() == PROMPT
    assert all(torch.equal(*pair) for pair in zip(before, kept(cache), strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "full"])
def test_accepting_nothing_again_and_again_changes_nothing(name):
    model = tiny()
    cache, ids, _ = _filled(model, name)
    once = copy.deepcopy(cache)
    for _ in range(3):
        cache.crop(0)
    _assert_same(cache, once)
    assert cache.stored == once.stored
    one, other = (forward(model, each, ids[:, 23:24]) for each in (cache, once))
    assert (one - other).abs().max() < NOISE
    cache.activate_past_recording()
    forward(model, cache, ids[:, 24:25])
    forward(model, once, ids[:, 24:25])
    for _ in range(3):
        cache.crop(0)
    _assert_same(cache, once)


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(window=3, kernel=3, scores="prompt"),
        PyramidKV(window=3, kernel=3, rounding="authors"),
        small("h2o", protect_prompt=0.4),
        small("tova", protect_prompt=0.4),
    ],
    ids=lambda policy: policy.name,
)
def test_a_prompt_of_which_no_token_followed_is_not_over(policy):
    model, ids = tiny(), text(length=40)
    plain, drafted = (EvictingCache(model, policy, budget=12) for _ in range(2))
    generate(model, ids[:, :20], plain, new=1)
    generate(model, ids[:, :20], drafted, new=1, prompt_lookup_num_tokens=4)
    for cache in (plain, drafted):
        generate(model, ids, cache, new=1)
    _assert_same(drafted, plain)


def _hybrid(kinds: list[str]) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
             "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 16}  # fmt: skip  # one shape
    torch.manual_seed(0)
    return sharpened(Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=kinds, sliding_window=5)))


def test_a_hybrids_cache_survives_an_assisted_call_that_never_began():
    model = _hybrid(["sliding_attention", "full_attention"])
    cache, fresh = (EvictingCache(model, "h2o", budget=BUDGET) for _ in range(2))
    with pytest.raises(ValueError, match="batch_size"):
        generate(model, text(2, 20), cache, prompt_lookup_num_tokens=4)
    cache.crop(0)
    copy.deepcopy(cache)
    expected = generate(model, text(length=20), fresh).sequences
    assert torch.equal(generate(model, text(length=20), cache).sequences, expected)


def test_sliding_layers_that_outgrew_their_window_take_nothing_back_unless_recorded():
    model = _hybrid(["sliding_attention", "full_attention"])
    cache = EvictingCache(model, "random", budget=50)
    forward(model, cache, text(length=20))
    with pytest.raises(UnsupportedOperationError, match="DynamicSlidingWindowLayer"):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("name", ["h2o", "random"])
def test_a_kernel_that_fails_in_the_last_layer_is_noticed(name, recording, register_kernel):
    fails: list[int] = []

    def kernel(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx in fails:
            raise RuntimeError("out of memory")
        return sdpa_attention_forward(module, *args, **kwargs)

    model = tiny()
    model.set_attn_implementation(register_kernel("fragile", kernel, sdpa_mask))
    cache, ids, _ = _filled(model, name)
    if recording:
        cache.activate_past_recording()
    fails.append(2)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward(model, cache, ids[:, 23:25])
    fails.clear()
    for use in (lambda: forward(model, cache, ids[:, 25:26]), lambda: cache.crop(0), lambda: copy.deepcopy(cache)):
        with pytest.raises(ObservationError, match=r"cache\.reset\(\)"):
            use()
