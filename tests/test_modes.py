"""Every way in which generate() and its users call a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from helpers import (
    BUDGET,
    HEADS,
    NOISE,
    PROMPT,
    VOCABULARY,
    batch,
    blocks_of,
    every_implementation,
    every_policy,
    forward,
    generate,
    kept,
    loop,
    plain,
    sharpened,
    small,
    text,
    tiny,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from kvevict import EvictingCache, OptionError, UnsupportedOperationError, WrongModelError, host

ROOM = 64
some_policies = pytest.mark.parametrize("name", ["streaming_llm", "random", "h2o", "snapkv", "adaptive_ema"])


# -- sampling and search -------------------------------------------------------------------------------------------


@every_policy
@every_implementation
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=["sample", "sequences", "beams", "beam-sample"],
)
def test_with_room_every_search_gives_what_the_full_cache_gives(name, implementation, how):
    model = tiny(implementation)
    ids, mask = batch(True, PROMPT)
    outputs = []
    for cache in (plain(model), EvictingCache(model, small(name), budget=ROOM)):
        torch.manual_seed(3)
        outputs.append(generate(model, ids, cache, mask, **how, return_dict_in_generate=False))
    assert torch.equal(*outputs)


@some_policies
def test_a_filled_cache_is_expanded_for_beams_with_all_it_knows(name):
    model = tiny()
    prompt, question = text(length=PROMPT), text(length=PROMPT + 4)
    filled = EvictingCache(model, small(name), budget=BUDGET)
    forward(model, filled, prompt)
    once = copy.deepcopy(filled)
    filled.batch_repeat_interleave(3)
    sequences = generate(model, question, filled, num_beams=3, num_return_sequences=3).sequences
    assert sequences.shape == (3, PROMPT + 4 + 8)
    # each beam, replayed alone from the cache as it was
    tails = sequences[:, PROMPT : PROMPT + 4 + 7]
    for row in range(3):
        alone = copy.deepcopy(once)
        loop(model, alone, [tails[row : row + 1, :4], *tails[row : row + 1, 4:].split(1, 1)])
        # generate() leaves the rows in the order of its last step
        assert any(
            all(torch.equal(one[0], held[other]) for one, held in zip(kept(alone), kept(filled), strict=True))
            for other in range(3)
        )


def test_a_filled_cache_of_another_batch_size_is_refused():
    model = tiny()
    filled = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, filled, text(length=PROMPT))
    with pytest.raises(WrongModelError, match="batch_repeat_interleave"):
        generate(model, text(length=PROMPT + 4), filled, num_beams=3)


# -- what comes out ------------------------------------------------------------------------------------------------


@some_policies
@every_implementation
def test_the_output_holds_the_cache(name, implementation):
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    out = generate(model, text(length=PROMPT), cache, output_scores=True, output_hidden_states=True)
    assert (out.cache if hasattr(out, "cache") else out.past_key_values) is cache
    assert len(out.scores) == len(out.hidden_states) == 8


def test_eager_attentions_are_rows_over_what_is_held():
    model = tiny("eager")
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    out = generate(model, text(length=PROMPT), cache, output_attentions=True)
    assert [step[0].shape[-1] for step in out.attentions] == [PROMPT] + [BUDGET + 1] * 7
    assert all(torch.allclose(layer.sum(-1), torch.ones(()), atol=1e-5) for step in out.attentions for layer in step)


class _Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten())

    def end(self) -> None:
        self.ended = True


class _AfterFive(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= PROMPT + 5, dtype=torch.bool)


@some_policies
def test_streamers_and_stopping_criteria_see_every_token(name):
    model, streamer = tiny(), _Streamed()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    out = generate(model, text(length=PROMPT), cache, new=20, streamer=streamer,
                   stopping_criteria=StoppingCriteriaList([_AfterFive()]))  # fmt: skip  # one call
    assert out.sequences.shape[1] == PROMPT + 5
    assert torch.equal(torch.cat(streamer.tokens), out.sequences[0]) and streamer.ended
    assert cache.get_seq_length() == PROMPT + 4


# -- chats and pipelines -------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"  # fmt: skip # noqa: E501 - a template is one string


def _tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "user", "assistant", *(f"w{i}" for i in range(VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
    fast.chat_template, fast.padding_side = TEMPLATE, "left"
    return fast


def _turns(rows: int, turn: int) -> list[str]:
    drawn = torch.randint(0, 90, (rows, 8 + 3 * turn), generator=torch.Generator().manual_seed(turn))
    return [" ".join(f"w{int(i)}" for i in row) for row in drawn]


@some_policies
@every_implementation
@pytest.mark.parametrize("rows", [1, 2])
def test_chats_feed_only_what_is_new_and_stay_in_budget(name, implementation, rows):
    """The documented loop: the whole chat through the template, one cache, turn after turn."""
    model, tokenizer = tiny(implementation), _tokenizer()
    cache = EvictingCache(model, small(name), budget=BUDGET)
    fed: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    chats: list[list[dict[str, str]]] = [[] for _ in range(rows)]
    for turn in range(3):
        for chat, said in zip(chats, _turns(rows, turn), strict=True):
            chat.append({"role": "user", "content": said})
        inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt",
                                               return_dict=True, padding=True)  # fmt: skip  # one call
        seen, length = cache.get_seq_length(), inputs["input_ids"].shape[1]
        fed.clear()
        out = generate(model, inputs["input_ids"], cache, inputs["attention_mask"], new=6).sequences
        assert fed == [length - seen] + [1] * 5
        assert cache.get_seq_length() == length + 5
        assert max(cache.stored) <= BUDGET + (5 if name == "pyramidkv" else 0)
        for chat, said in zip(chats, tokenizer.batch_decode(out[:, length:]), strict=True):
            chat.append({"role": "assistant", "content": said})
    handle.remove()


@some_policies
def test_the_text_generation_pipeline_takes_the_cache(name):
    model, tokenizer = tiny(), _tokenizer()
    prompt = _turns(1, 4)[0]
    cache = EvictingCache(model, small(name), budget=BUDGET)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    named = {host.cache_argument(model): cache}
    got = pipe(prompt, max_new_tokens=8, do_sample=False, **named)[0]["generated_text"]
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    expected = generate(model, ids, EvictingCache(model, small(name), budget=BUDGET)).sequences
    assert got.replace(" ", "") == (prompt + tokenizer.decode(expected[0, ids.shape[1] :])).replace(" ", "")
    assert cache.stored == [BUDGET] * 3


# -- what is refused -----------------------------------------------------------------------------------------------


@every_implementation
@pytest.mark.parametrize("name", ["h2o", "random"])
def test_a_cache_that_is_not_to_be_used_is_refused(name, implementation):
    """transformers would feed it the whole text again at every step."""
    model = tiny(implementation)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    with pytest.raises(OptionError, match="use_cache=False"):
        generate(model, text(length=PROMPT), cache, use_cache=False)
    assert cache.get_seq_length() == 0
    # a forward of one's own uses what it is given, as with transformers' own caches
    model.config.use_cache = False
    with torch.no_grad():
        model(text(length=PROMPT), **{host.cache_argument(model): cache})
    assert cache.stored == [BUDGET] * 3


def _phi3(original: int) -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": original}  # fmt: skip  # one table
    torch.manual_seed(0)
    return sharpened(Phi3ForCausalLM(Phi3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2,
        vocab_size=VOCABULARY, rope_parameters=rope, max_position_embeddings=4 * original,
        original_max_position_embeddings=original, pad_token_id=0)))  # fmt: skip  # one model


@pytest.mark.parametrize("name", ["h2o", "random"])
@pytest.mark.parametrize("prompt", [24, 40], ids=["while-decoding", "prompt"])
def test_generate_never_swaps_the_cache_in_silence(name, prompt):
    """Phi-3 recomputes everything in a cache of its own once the text outgrows the short RoPE factors."""
    model = _phi3(32)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    with pytest.raises(UnsupportedOperationError, match="outgrows 32 tokens"):
        generate(model, text(length=prompt), cache, new=20)
    assert generate(model, text(length=prompt), plain(model), new=20).sequences.shape[1] == prompt + 20
    short = EvictingCache(model, small(name), budget=BUDGET)
    assert generate(model, text(length=20), short, new=12).sequences.shape[1] == 32
    assert short.stored == [BUDGET] * 2
    loop(model, short, text(length=20).split(1, 1))  # a loop of one's own goes on


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32)).eval()


def _opt() -> Any:
    return OPTForCausalLM(OPTConfig(hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=32, word_embed_proj_dim=64)).eval()  # fmt: skip  # one model


@pytest.mark.parametrize("make", [_gpt2, _opt], ids=["gpt2", "opt"])
def test_learned_positions_end_where_the_model_ends(make):
    """Evicting makes no room among them: the model itself raises, as it does with any cache."""
    model = make()
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    loop(model, cache, text(length=32).split(8, 1))
    with pytest.raises(IndexError):
        forward(model, cache, text(length=1))
    full = DynamicCache(config=model.config)
    loop(model, full, text(length=32).split(8, 1))
    with pytest.raises(IndexError):
        forward(model, full, text(length=1))


# -- accelerate ----------------------------------------------------------------------------------------------------


@some_policies
@every_implementation
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch"])
def test_models_under_accelerates_hooks_give_what_they_give_without(name, implementation, how, tmp_path):
    ids, mask = batch(True)
    model = tiny(implementation)
    expected = EvictingCache(model, small(name), budget=BUDGET)
    logits = loop(model, expected, blocks_of(ids), mask, positions=True)
    moved = tiny(implementation)
    if how == "cpu_offload":
        cpu_offload(moved, torch.device("cpu"))
    elif how == "disk_offload":
        disk_offload(moved, str(tmp_path), torch.device("cpu"))
    else:
        parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
                 "model.layers.2": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
                 "lm_head": "cpu"}  # fmt: skip  # one map
        dispatch_model(moved, parts, main_device="cpu", offload_dir=str(tmp_path))
    cache = EvictingCache(moved, small(name), budget=BUDGET)
    got = loop(moved, cache, blocks_of(ids), mask, positions=True)
    for one, other in zip(got, logits, strict=True):
        assert (one - other).abs().nan_to_num().max() < NOISE
    assert all(torch.equal(*pair) for pair in zip(kept(cache), kept(expected), strict=True))


# -- padding on the other side -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_right_padding_is_exact_too(name, dtype):
    model = tiny(dtype=dtype)
    ids = text(2, 20)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    together, alone = (EvictingCache(model, small(name), budget=BUDGET) for _ in range(2))
    logits = forward(model, together, ids, mask, positions=True)
    own = forward(model, alone, ids[1:, :12], positions=True)
    noise = NOISE if dtype == torch.float32 else 0.1
    assert (logits[1, :12] - own[0]).abs().max() < noise
    for positions, expected in zip(kept(together), kept(alone), strict=True):
        assert torch.equal(positions[1], expected[0])
