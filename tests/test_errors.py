"""Everything a user can get wrong: which error, at which call, saying what, and what stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from helpers import (
    BUDGET,
    FREE,
    HEADS,
    KV_HEADS,
    LENGTHS,
    NAMES,
    OBSERVING,
    PROMPT,
    VOCABULARY,
    alone_and_padded,
    batch,
    blocks_of,
    every_implementation,
    every_policy,
    forward,
    generate,
    kept,
    loop,
    plain,
    registries,
    small,
    snapshot,
    text,
    tiny,
)
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvevict import (
    Column,
    EvictingCache,
    Held,
    KvevictError,
    ObservationError,
    OptionError,
    Policy,
    PolicyError,
    UnsupportedModelError,
    WrongModelError,
    detach,
)
from kvevict.policies import H2O, POLICIES, TOVA, StreamingLLM
from kvevict.policies.base import ALL_QUERIES


def _assert_refused(error: type[Exception], words: list[str], model: Any, *args: Any, **options: Any) -> None:
    """The constructor raises ``error`` with all of ``words``, and nothing about the model or transformers changed."""
    before = snapshot(model) if isinstance(model, torch.nn.Module) else None
    tables = registries()
    with pytest.raises(error) as caught:
        EvictingCache(model, *args, **options)
    assert isinstance(caught.value, KvevictError)
    for word in words:
        assert word.lower() in str(caught.value).lower()
    assert before is None or snapshot(model) == before
    assert registries() == tables


# -- policies and budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "near"),
    [("h20", "'h2o'"), ("H2O", "'h2o'"), ("snap-kv", "'snapkv'"), ("streaming llm", "'streaming_llm'")],
)
def test_an_unknown_policy_is_answered_with_a_near_name(given, near):
    _assert_refused(OptionError, [repr(given), f"did you mean {near}?", *POLICIES], tiny(), given)


@pytest.mark.parametrize("given", [None, 3, H2O, ["h2o"]])
def test_what_is_no_policy_is_refused(given):
    _assert_refused(OptionError, ["policy="], tiny(), given)


def test_an_unknown_option_is_answered_with_a_near_name():
    _assert_refused(OptionError, ["'h2o'", "'recents'", "did you mean 'recent'?", "group"], tiny(), "h2o", recents=3)


def test_options_beside_a_finished_policy_are_refused():
    _assert_refused(OptionError, ["recent", "where that policy is made"], tiny(), H2O(), recent=3)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (0, ["budget=0", "at least 1"]),
        (-4, ["budget=-4", "at least 1"]),
        (0.0, ["budget=0.0", "above 0 and up to 1"]),
        (-0.5, ["budget=-0.5", "above 0 and up to 1"]),
        (1.5, ["budget=1.5", "share", "budget=1"]),
        (512.0, ["budget=512.0", "for 512 tokens write budget=512"]),
        (float("nan"), ["budget=nan"]),
        (float("inf"), ["budget=inf"]),
        (True, ["budget=True"]),
        ("512", ["budget='512'"]),
        (None, ["budget=None"]),
    ],
)
@every_policy
def test_a_budget_that_cannot_be_is_refused(budget, words, name):
    _assert_refused(OptionError, words, tiny(), small(name), budget=budget)


@every_policy
def test_a_budget_smaller_than_its_protections_is_refused(name):
    if name == "full":
        pytest.skip("full has no budget")
    policy = small(name, sinks=4, recent=6)
    _assert_refused(
        OptionError, ["budget=9", "sinks=4", "recent=6", "10 tokens", "raise budget"], tiny(), policy, budget=9
    )
    EvictingCache(tiny(), policy, budget=10)


def test_the_advised_budget_is_accepted():
    for name in NAMES:
        cache = EvictingCache(tiny(), small(name, sinks=4, recent=6), budget=10)
        assert cache.budget == 10


@pytest.mark.parametrize("budget", [3, 4])
def test_a_pyramids_smallest_layer_must_hold_its_protections(budget):
    policy = small("pyramidkv", sinks=1)  # one sink and three recent tokens in every layer
    if budget == 3:
        _assert_refused(OptionError, ["budget=3", "sinks=1", "recent=3"], tiny(), policy, budget=budget)
    cache = EvictingCache(tiny(), policy, budget=max(4, budget))
    assert min(cache.policy.layer_budgets(4, 3)) >= 4


def test_a_share_of_the_prompt_that_does_not_fit_is_refused():
    _assert_refused(
        OptionError, ["budget=9", "protect_prompt=1.0", "raise budget"], tiny(), TOVA(protect_prompt=1.0, recent=1),
        budget=9,
    )  # fmt: skip  # one call


def test_a_share_of_the_tokens_seen_cannot_protect_a_whole_prompt():
    _assert_refused(
        OptionError, ["budget=0.5", "protect_prompt='whole'", "protect_prompt=0.5"], tiny(), "tova", budget=0.5,
        protect_prompt="whole",
    )  # fmt: skip  # one call
    EvictingCache(tiny(), "tova", budget=0.5, protect_prompt=0.5)  # the advice works


def test_protections_that_outgrow_every_share_are_refused():
    """H2O protects half of the budget by default: with more than the other half, none is large enough."""
    _assert_refused(
        OptionError, ["protect_prompt=0.7", "lower one"], tiny(), "h2o", budget=0.5, protect_prompt=0.7
    )  # fmt: skip  # one call


def _held_by_rows(model: Any, cache: EvictingCache, padded: bool) -> Iterator[tuple[int, list[list[int]]]]:
    """After every forward, for each layer and row: how many real tokens it has seen, and what each head holds."""
    ids, mask = batch(padded)
    done = 0
    for block in blocks_of(ids):
        done += block.shape[1]
        forward(model, cache, block, None if mask is None else mask[:, :done], positions=True)
        for positions in kept(cache):
            for row, length in enumerate(LENGTHS[: len(ids)]):
                yield done - PROMPT + length, positions[row].tolist()


@pytest.mark.parametrize("options", [{"sinks": 3, "recent": 2}, {"sinks": 2, "recent": 1, "protect_prompt": 0.5},
                                     {"sinks": 5, "protect_prompt": 0.4}])  # fmt: skip  # one list
@every_policy
@every_implementation
@alone_and_padded
def test_a_small_share_still_holds_its_protections(name, options, implementation, padded):
    model, policy = tiny(implementation), small(name, **options)
    cache = EvictingCache(model, policy, budget=0.1)
    recent = int(policy.recent_for(policy.least()))
    for seen, heads in _held_by_rows(model, cache, padded):
        protected = set(range(min(policy.sinks, seen))) | set(range(max(0, seen - recent), seen))
        assert all(protected <= set(head) for head in heads)


def test_the_authors_rounding_never_gives_a_layer_less_than_its_protections():
    policy = small("pyramidkv", rounding="authors", sinks=4)
    model = tiny(num_hidden_layers=6)
    cache = EvictingCache(model, policy, budget=7)
    assert min(policy.layer_budgets(7, 6, 40)) < policy.least() == 7
    assert min(cache.spec.tokens(layer, 41, 40) for layer in range(6)) == 7
    loop(model, cache, blocks_of(text(length=60), [40, *([1] * 20)]))
    assert all({0, 1, 2, 3, 57, 58, 59} <= set(head) for p in kept(cache) for head in p[0].tolist())


@pytest.mark.parametrize("option", ["sinks", "recent"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "4"])
@every_policy
def test_protections_are_numbers_of_tokens(option, value, name):
    with pytest.raises(OptionError, match=f"{option}={value!r}"):
        small(name, **{option: value})


@pytest.mark.parametrize("value", [0, -0.5, 1.5, True, "most"])
@every_policy
def test_a_protected_share_is_a_share(value, name):
    with pytest.raises(OptionError, match=r"protect_prompt=.*up to 1"):
        small(name, protect_prompt=value)


@every_policy
@every_implementation
@alone_and_padded
def test_a_prompt_too_long_to_be_protected_is_refused_and_changes_nothing(name, implementation, padded):
    if name == "full":
        pytest.skip("full never evicts")
    model = tiny(implementation)
    ids, mask = batch(padded, PROMPT)
    options = {"beta": 1} if name == "pyramidkv" else {}  # equal shares: its last layer could not hold the short one
    policy = small(name, protect_prompt="whole", recent=1, **options)
    cache = EvictingCache(model, policy, budget=12)
    with pytest.raises(OptionError, match=r"protect_prompt='whole'.*budget=\d+: raise budget"):
        forward(model, cache, ids, mask)
    assert (cache.get_seq_length(), cache.stored, cache.nbytes) == (0, [0, 0, 0], 0)
    shorter = blocks_of(text(2, 6), [2, 1, 3])
    expected = loop(model, EvictingCache(model, policy, budget=12), shorter)
    assert all(torch.equal(*pair) for pair in zip(loop(model, cache, shorter), expected, strict=True))


def test_kept_positions_of_a_layer_that_is_not_there_is_refused():
    cache = EvictingCache(tiny(), "h2o", budget=BUDGET)
    for index in (3, -4):
        with pytest.raises(OptionError, match="layers 0 to 2"):
            cache.kept_positions(index)


# -- models --------------------------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
         "vocab_size": VOCABULARY}  # fmt: skip  # one shape


def _t5() -> Any:
    return T5ForConditionalGeneration(T5Config(d_model=64, d_ff=64, num_layers=2, num_heads=4, d_kv=16,
                                               vocab_size=VOCABULARY))  # fmt: skip  # one model


def _bart() -> Any:
    return BartForConditionalGeneration(BartConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2))  # fmt: skip  # one model


def _deepseek() -> Any:
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **SHAPE, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1, first_k_dense_replace=2,
        moe_intermediate_size=32))  # fmt: skip  # one model


def _gemma3n() -> Any:
    return Gemma3nForCausalLM(Gemma3nTextConfig(
        **{**SHAPE, "num_hidden_layers": 4, "intermediate_size": [64] * 4}, num_key_value_heads=2, head_dim=16,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4))  # fmt: skip  # one model


UNSUPPORTED = {
    "t5": (_t5, ["T5ForConditionalGeneration", "encoder-decoder"]),
    "bart": (_bart, ["BartForConditionalGeneration", "encoder-decoder"]),
    "deepseek_v3": (_deepseek, ["DeepseekV3ForCausalLM", "MLA"]),
    "gemma3n": (_gemma3n, ["Gemma3nForCausalLM", "shares keys and values"]),
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=VOCABULARY)),
        ["BloomForCausalLM", "ALiBi"],
    ),
    "mpt": (
        lambda: MptForCausalLM(MptConfig(d_model=64, n_layers=2, n_heads=4, vocab_size=VOCABULARY)),
        ["MptForCausalLM", "ALiBi"],
    ),
    "mamba": (
        lambda: MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=VOCABULARY)),
        ["MambaForCausalLM"],
    ),
    "all_sliding": (
        lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=16, sliding_window=8)),
        ["MistralForCausalLM", "no layer that keeps the keys and values of every token"],
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_unsupported_models_are_refused_by_name(kind, name):
    make, words = UNSUPPORTED[kind]
    _assert_refused(UnsupportedModelError, [*words, "use transformers' own cache"], make(), name, budget=BUDGET)


@every_policy
def test_flex_attention_is_refused_with_what_to_do(name):
    model = tiny()
    model.config._attn_implementation = "flex_attention"
    words = ["flex_attention", "set_attn_implementation('sdpa')"]
    _assert_refused(UnsupportedModelError, words, model, small(name), budget=BUDGET)


@pytest.mark.parametrize("given", [None, "meta-llama/Llama-3", 3, torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(given):
    _assert_refused(UnsupportedModelError, [type(given).__name__], given, "h2o")


def test_errors_are_also_the_builtins_that_a_caller_expects():
    assert issubclass(OptionError, ValueError) and issubclass(PolicyError, ValueError)
    assert issubclass(WrongModelError, ValueError) and issubclass(UnsupportedModelError, TypeError)
    assert issubclass(ObservationError, RuntimeError)


# -- a cache in the wrong hands ------------------------------------------------------------------------------------


@every_policy
@every_implementation
@pytest.mark.parametrize("who", ["other", "deepcopy", "config", "deeper"])
@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
def test_a_cache_given_to_another_model_is_an_error_at_that_call(name, implementation, who, prepared):
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    other = {
        "other": lambda: tiny(implementation, seed=5),
        "deepcopy": lambda: copy.deepcopy(tiny(implementation)),
        "config": lambda: type(model)(model.config).eval(),
        "deeper": lambda: tiny(implementation, num_hidden_layers=5),
    }[who]()
    if prepared:
        EvictingCache(other, small(name), budget=BUDGET)
    blocks = blocks_of(text(), [20, 1, 15])
    forward(model, cache, blocks[0])
    held = kept(cache)
    with pytest.raises(WrongModelError, match="build an EvictingCache for"):
        forward(other, cache, blocks[1])
    assert cache.get_seq_length() == PROMPT
    assert all(torch.equal(one, two) for one, two in zip(held, kept(cache), strict=True))
    straight = EvictingCache(model, small(name), budget=BUDGET)
    expected = loop(model, straight, blocks)
    assert torch.equal(forward(model, cache, blocks[1]), expected[1])  # and the right model can go on
    assert torch.equal(forward(model, cache, blocks[2]), expected[2])


@every_policy
@every_implementation
def test_a_fresh_cache_given_to_another_model_is_an_error(name, implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    other = tiny(implementation, seed=5)
    before = snapshot(other)
    with pytest.raises(WrongModelError):
        generate(other, text(length=PROMPT), cache)
    assert cache.get_seq_length() == 0
    assert snapshot(other) == before


@every_policy
@every_implementation
@pytest.mark.parametrize("rows", [1, 3])
def test_another_batch_size_is_refused_and_the_cache_goes_on(name, implementation, rows):
    model = tiny(implementation)
    ids = text(2, 30)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    forward(model, cache, ids[:, :PROMPT])
    held = kept(cache)
    for length in (1, 4):
        with pytest.raises(WrongModelError, match=f"batch of {rows} rows given to a cache that holds 2"):
            forward(model, cache, text(rows, length))
    assert cache.get_seq_length() == PROMPT
    assert all(torch.equal(one, two) for one, two in zip(held, kept(cache), strict=True))
    straight = EvictingCache(model, small(name), budget=BUDGET)
    expected = loop(model, straight, blocks_of(ids, [20, 1, 9]))
    assert torch.equal(forward(model, cache, ids[:, 20:21]), expected[1])
    assert torch.equal(forward(model, cache, ids[:, 21:]), expected[2])


@every_policy
@pytest.mark.parametrize(("was", "now"), [("sdpa", "eager"), ("eager", "sdpa")])
@pytest.mark.parametrize("length", [1, 5])
def test_a_changed_attention_implementation_is_an_error_at_the_next_update(name, was, now, length):
    model = tiny(was)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    blocks = blocks_of(text(length=30), [20, 1, 9])
    forward(model, cache, blocks[0])
    model.set_attn_implementation(now)
    with pytest.raises(ObservationError, match=f"'{was}' when this cache was built and is '{now}'"):
        forward(model, cache, text(length=length))
    assert cache.get_seq_length() == PROMPT
    model.set_attn_implementation(was)  # the error says: set it back
    straight = EvictingCache(model, small(name), budget=BUDGET)
    expected = loop(model, straight, blocks)
    assert torch.equal(forward(model, cache, blocks[1]), expected[1])
    assert torch.equal(forward(model, cache, blocks[2]), expected[2])


@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
@every_implementation
def test_an_implementation_changed_before_the_first_update_is_an_error(name, implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, name, budget=BUDGET)
    model.set_attn_implementation("eager" if implementation == "sdpa" else "sdpa")
    with pytest.raises(ObservationError, match="attention implementation"):
        generate(model, text(length=PROMPT), cache)
    assert cache.get_seq_length() == 0
    fresh = EvictingCache(model, name, budget=BUDGET)
    loop(model, fresh, blocks_of(text()))
    assert max(fresh.stored) == BUDGET


@pytest.mark.parametrize("name", OBSERVING)
@every_implementation
@pytest.mark.parametrize("fed", [0, PROMPT])
def test_a_cache_of_a_detached_model_is_an_error_and_never_grows(name, implementation, fed):
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    if fed:
        forward(model, cache, text(length=fed))
    detach(model)
    for _ in range(2):
        with pytest.raises(ObservationError, match="detached"):
            forward(model, cache, text(length=1))
    assert cache.get_seq_length() == fed


@pytest.mark.parametrize("name", FREE)
def test_policies_that_need_no_attention_outlive_detach(name):
    model = tiny()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    expected = loop(model, EvictingCache(model, small(name), budget=BUDGET), blocks_of(text()))
    detach(model)
    got = loop(model, cache, blocks_of(text()))
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


@every_policy
def test_keys_that_are_never_attended_to_are_an_error_at_the_next_update(name):
    """A model whose attention does not arrive must not grow the cache in silence."""
    model = tiny()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    keys = torch.randn(1, KV_HEADS, 3, 16)
    for layer in range(3):
        cache.update(keys, keys, layer)
    for _ in range(2):
        with pytest.raises(ObservationError, match=r"never reached the cache.*cache\.reset\(\)"):
            cache.update(keys, keys, 0)
        assert [layer.get_seq_length() for layer in cache.layers] == [3, 3, 3]
    cache.reset()
    expected = loop(model, EvictingCache(model, small(name), budget=BUDGET), blocks_of(text()))
    assert all(torch.equal(*pair) for pair in zip(loop(model, cache, blocks_of(text())), expected, strict=True))


@every_policy
@every_implementation
def test_a_forward_that_was_interrupted_is_noticed_by_the_next_one(name, implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    blocks = blocks_of(text())
    forward(model, cache, blocks[0])

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, blocks[1])
    handle.remove()
    with pytest.raises(ObservationError, match=r"cache\.reset\(\)"):
        forward(model, cache, blocks[1])
    cache.reset()
    expected = loop(model, EvictingCache(model, small(name), budget=BUDGET), blocks)
    assert all(torch.equal(*pair) for pair in zip(loop(model, cache, blocks), expected, strict=True))


@every_implementation
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_an_interrupt_in_a_sliding_layer_below_is_noticed(name, implementation):
    """The first layer is transformers' own and took the tokens; ours never saw them."""
    kinds = ["sliding_attention", "full_attention"]
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
             "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 16}  # fmt: skip  # one shape
    model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=kinds, sliding_window=5)).eval()
    model.set_attn_implementation(implementation)
    cache = EvictingCache(model, name, budget=BUDGET)
    loop(model, cache, blocks_of(text(length=22), [20, 1, 1]))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, text(length=3))
    handle.remove()
    with pytest.raises(ObservationError, match="ended halfway"):
        forward(model, cache, text(length=3))
    cache.reset()
    forward(model, cache, text(length=3))


def test_a_layer_that_the_model_does_not_have_is_an_error():
    cache = EvictingCache(tiny(), "h2o", budget=BUDGET)
    with pytest.raises(WrongModelError, match="layer 3 was updated in a cache built for 3 layers"):
        cache.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), 3)
    assert cache.get_seq_length() == 0


@every_implementation
@pytest.mark.parametrize("name", ["h2o", "random"])
def test_a_mask_that_forgets_evicted_tokens_is_an_error(name, implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, name, budget=BUDGET)
    forward(model, cache, text(length=PROMPT))
    with pytest.raises((ObservationError, ValueError, RuntimeError)):
        forward(model, cache, text(length=2), torch.ones(1, 1, 2, BUDGET + 2, dtype=torch.bool))


# -- policies that break their contract ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Broken(Policy):
    """Returns whatever ``how`` says."""

    name: ClassVar[str] = "broken_on_purpose"
    how: str = "nan"
    observing: bool = False

    @property
    def queries(self) -> int:
        return ALL_QUERIES if self.observing else 0

    def score(self, held: Held) -> Any:
        rows, heads, slots = held.positions.shape
        return {
            "nan": lambda: torch.full((rows, heads, slots), float("nan")),
            "one nan": lambda: torch.zeros(rows, heads, slots).index_fill_(2, torch.tensor([slots - 1]), float("nan")),
            "too long": lambda: torch.zeros(rows, heads, slots + 1),
            "too short": lambda: torch.zeros(rows, heads, slots - 1),
            "query heads": lambda: torch.zeros(rows, HEADS, slots),
            "rows": lambda: torch.zeros(rows + 1, heads, slots),
            "flat": lambda: torch.zeros(slots),
            "two dimensions": lambda: torch.zeros(rows, slots),
            "none": lambda: None,
            "list": lambda: held.positions.tolist(),
            "number": lambda: 1.0,
            "bools": lambda: held.positions > 3,
            "complex": lambda: torch.zeros(held.positions.shape, dtype=torch.complex64),
        }[self.how]()


@pytest.mark.parametrize("how", ["nan", "one nan", "too long", "too short", "query heads", "rows", "flat",
                                 "two dimensions", "none", "list", "number", "bools", "complex"])  # fmt: skip  # a list
@every_implementation
@pytest.mark.parametrize("observing", [False, True], ids=["free", "observing"])
@pytest.mark.parametrize("sizes", [[20], [8, 1, 1]], ids=["prompt", "decoding"])
def test_a_broken_policy_is_named_at_the_first_eviction(how, implementation, observing, sizes):
    model = tiny(implementation)
    cache = EvictingCache(model, Broken(how=how, observing=observing), budget=BUDGET)
    blocks = blocks_of(text(length=sum(sizes)), sizes)
    loop(model, cache, blocks[:-1])  # nothing to evict yet
    with pytest.raises(PolicyError, match="broken_on_purpose") as caught:
        forward(model, cache, blocks[-1])
    assert "layer 0" in str(caught.value)
    assert ("NaN" if "nan" in how else "score() must return") in str(caught.value)


@pytest.mark.parametrize("budgets", [[9, 9], [9, 0, 9], [9.0, 9.0, 9.0], [True, 9, 9]])
def test_layer_budgets_that_cannot_be_are_named_before_anything_is_built(budgets):
    @dataclass(frozen=True, kw_only=True)
    class Uneven(H2O):
        name: ClassVar[str] = "uneven"

        def layer_budgets(self, budget: int, layers: int, prompt: int | None = None) -> list[int]:
            return budgets

    _assert_refused(PolicyError, ["uneven", "layer_budgets() must return 3 ints", str(budgets)], tiny(), Uneven())


def test_a_score_of_another_shape_is_told_what_it_should_be():
    model = tiny()
    cache = EvictingCache(model, Broken(how="query heads"), budget=BUDGET)
    with pytest.raises(PolicyError) as caught:
        forward(model, cache, text(2, PROMPT))
    assert "(2, 4, 20)" in str(caught.value) and "(2, 2, 20)" in str(caught.value)


@dataclass(frozen=True, kw_only=True)
class HatesTheProtected(Policy):
    """Scores the oldest and the newest tokens lowest, as low as numbers go."""

    name: ClassVar[str] = "hates_the_protected"
    whole: bool = False

    def score(self, held: Held) -> Tensor:
        ends = (held.positions < self.sinks) | (held.positions >= held.seen - self.recent)
        if self.whole:
            return torch.where(ends, torch.iinfo(torch.int64).min, held.positions)
        return torch.where(ends, float("-inf"), held.positions.float())


@pytest.mark.parametrize("whole", [False, True], ids=["floats", "integers"])
@every_implementation
@alone_and_padded
def test_no_score_can_evict_the_protected(whole, implementation, padded):
    model = tiny(implementation)
    cache = EvictingCache(model, HatesTheProtected(sinks=3, recent=3, whole=whole), budget=BUDGET)
    for seen, heads in _held_by_rows(model, cache, padded):
        protected = set(range(min(3, seen))) | set(range(max(0, seen - 3), seen))
        assert all(protected <= set(head) for head in heads)


@dataclass(frozen=True, kw_only=True)
class Favourites(Policy):
    """A user's own, registered nowhere: keeps even positions, and counts what it was shown."""

    name: ClassVar[str] = ""

    @property
    def queries(self) -> int:
        return 2

    def columns(self, budget: int) -> dict[str, Column]:
        return {"shown": Column(dtype=torch.int32)}

    def observe(self, held: Held, rows: Any) -> None:
        held["shown"].add_((rows.weights > 0).sum((2, 3)).int())

    def score(self, held: Held) -> Tensor:
        return (held.positions % 2 == 0).float() + held["shown"] * 0


@every_implementation
def test_a_users_own_policy_works_without_registration(implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, Favourites(), budget=8)
    loop(model, cache, blocks_of(text(), [20, 1, 1, 14]))
    assert cache.kept_positions(0)[0, 0].tolist() == list(range(20, 36, 2))
    assert Favourites not in POLICIES.values()
    assert "Favourites" in repr(cache)


@every_implementation
def test_a_policy_that_takes_no_budget_seriously_is_still_held_to_it(implementation):
    @dataclass(frozen=True, kw_only=True)
    class Hoarder(H2O):
        name: ClassVar[str] = "hoarder"

        def score(self, held: Held) -> Tensor:
            return torch.full(held.positions.shape, float("inf"))

        def at_once(self, budget: int | Tensor) -> int | Tensor:
            return -5

    model = tiny(implementation)
    cache = EvictingCache(model, Hoarder(), budget=BUDGET)
    loop(model, cache, blocks_of(text()))
    assert cache.stored == [BUDGET] * 3


def test_half_precision_overflow_names_the_type_and_what_to_do():
    model = tiny("eager", torch.float16)
    model.model.embed_tokens.weight.data.fill_(6e4)
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(6e4)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    with pytest.raises(PolicyError, match=r"'h2o'.*NaN.*float16.*bfloat16 or float32"):
        forward(model, cache, text(length=PROMPT))


def test_ordinary_work_goes_on_after_every_error():
    """One model that saw a refused option, a broken policy and a wrong batch still does what it did."""
    model = tiny()
    blocks = blocks_of(text())
    full = loop(model, plain(model), blocks)
    evicted = loop(model, EvictingCache(model, "h2o", budget=BUDGET), blocks)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, cache, blocks[0])
    for attempt in (
        lambda: EvictingCache(model, "h20"),
        lambda: EvictingCache(model, StreamingLLM(), budget=2),
        lambda: forward(model, cache, text(4, 2)),
        lambda: forward(model, EvictingCache(model, Broken(observing=True), budget=2), blocks[0]),
    ):
        with pytest.raises(KvevictError):
            attempt()
    assert all(torch.equal(*pair) for pair in zip(loop(model, plain(model), blocks), full, strict=True))
    assert all(torch.equal(*pair) for pair in zip(loop(model, cache, blocks[1:]), evicted[1:], strict=True))
