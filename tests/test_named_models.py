"""Models whose traps differ: positions, windows, scaling, soft caps, sinks, experts, hybrids, images."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import build
from helpers import (
    NOISE,
    alone_and_padded,
    blocks_of,
    forward,
    generate,
    kept,
    largest_error,
    loop,
    plain,
    ragged_mask,
    sharpened,
    text,
)
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from kvevict import EvictingCache, UnsupportedModelError, WrongModelError, host, testing

BUDGET, ROOM, PROMPT = 9, 64, 20
BLOCKS = (PROMPT, 1, 1, 6, 1, 1)
FULL = ["full_attention"] * 2


def _rope(**options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **options}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip  # one config
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

TRAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-rope": ("llama", _rope(**LLAMA3)),
    "llama-yarn": ("llama", {**_rope(**YARN), "max_position_embeddings": 64}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "ministral-window": ("ministral", {"sliding_window": 5}),
    "qwen2-window-above": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
                                     "layer_types": ["full_attention", "sliding_attention"]}),
    "qwen3-norms": ("qwen3", {}),
    "phi3-partial-rotary": ("phi3", _rope(partial_rotary_factor=0.5)),
    "phi-partial-rotary": ("phi", _rope(partial_rotary_factor=0.5)),
    "gpt-neox-quarter-rotary": ("gpt_neox", {**_rope(partial_rotary_factor=0.25), "use_parallel_residual": False}),
    "gpt2-scaled-by-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": False}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
    "opt": ("opt", {}),
    "opt-norm-after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "gemma2-soft-cap": ("gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "layer_types": FULL}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8}),
    "gpt-oss-sinks": ("gpt_oss", {"layer_types": FULL}),
    "granite-multipliers": ("granite", {"attention_multiplier": 0.7, "residual_multiplier": 0.5,
                                        "embedding_multiplier": 3.0, "logits_scaling": 0.5}),
    "cohere-scaling": ("cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2-window": ("cohere2", {"sliding_window": 5}),
    "mixtral-one-expert": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-next": ("qwen3_next", {}),
}  # fmt: skip  # one model a line


def _model(trap: str) -> Any:
    family, options = TRAPS[trap]
    model = build(family, **options)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # older releases allow it sdpa, which knows no soft cap
    if family == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data = torch.tensor([1.0, -1.0, 2.0, 0.5])
    return model


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", ["h2o", "tova", "streaming_llm"])
@alone_and_padded
def test_a_named_models_logits_equal_the_reference(trap, name, padded):
    model = _model(trap)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids = text(3, sum(BLOCKS)) if padded else text(1, sum(BLOCKS))
    mask = ragged_mask(sum(BLOCKS)) if padded else None
    blocks = blocks_of(ids, BLOCKS)
    cache = EvictingCache(model, name, budget=BUDGET)
    got, held = testing.run(model, cache, blocks, mask)
    size = max(1.0, *(float(each.abs().max()) for each in got))
    assert largest_error(got, testing.replay(eager, held, blocks, mask), blocks, mask) < 5 * NOISE * size
    assert cache.stored == [BUDGET] * len(cache.evicting_layers)


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if host.implementation(_model(trap)) == "sdpa"])
def test_what_is_recomputed_beside_sdpa_is_what_eager_attention_shows(trap):
    """Scaling, norms and positions count alike: the same heavy hitters stay, with the same scores."""
    caches = []
    for implementation in ("sdpa", "eager"):
        model = _model(trap)
        model.set_attn_implementation(implementation)
        cache = EvictingCache(model, "h2o", budget=BUDGET)
        loop(model, cache, blocks_of(text(length=sum(BLOCKS)), BLOCKS))
        caches.append(cache)
    for one, other in zip(*map(kept, caches), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*(cache.evicting_layers for cache in caches), strict=True):
        scores = [layer.state["score"][:, :, : layer.slots].sort(-1).values for layer in (one, other)]
        assert torch.allclose(*scores, atol=1e-4)


# -- windows and hybrids: what is not ours stays as it is --------------------------------------------------------------


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a structure of lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in inner for tensor in _tensors(each)]


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2", "ministral", "cohere2", "gpt_oss", "qwen3_next", "lfm2"])
def test_layers_that_do_not_evict_hold_what_dynamic_cache_holds(family):
    model = build(family)
    full = plain(model)
    others = [i for i, layer in enumerate(full.layers) if not host.is_full_attention(layer)]
    assert others
    first = min(i for i in range(len(full.layers)) if i not in others)
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    for block in blocks_of(text(length=sum(BLOCKS)), BLOCKS):
        forward(model, cache, block)
        forward(model, full, block)
        assert [type(cache.layers[i]) for i in others] == [type(full.layers[i]) for i in others]
        for i in others:
            mine, theirs = _tensors(vars(cache.layers[i])), _tensors(vars(full.layers[i]))
            assert theirs
            assert [tensor.shape for tensor in mine] == [tensor.shape for tensor in theirs]
            if i < first:  # no eviction comes before it
                assert all(map(torch.equal, mine, theirs))
    assert cache.stored == [BUDGET] * len(cache.evicting_layers)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_wrong_batch_and_a_crop_of_nothing_leave_a_hybrid_s_cache_as_it_was(family):
    model, ids = build(family), text(length=sum(BLOCKS))
    cache, untouched = (EvictingCache(model, "h2o", budget=BUDGET) for _ in range(2))
    for each in (cache, untouched):
        forward(model, each, ids[:, :PROMPT])
    with pytest.raises(WrongModelError, match="batch of 2 rows given to a cache that holds 1"):
        forward(model, cache, ids[:, :1].expand(2, -1))
    cache.crop(0)
    for token in ids[:, PROMPT:].split(1, 1):
        assert torch.equal(forward(model, cache, token), forward(model, untouched, token))


def test_a_model_of_sliding_windows_only_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"MistralForCausalLM has no layer that keeps .* of every token"):
        EvictingCache(build("mistral", sliding_window=8), "h2o", budget=BUDGET)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n_text", "shares keys and values between layers"),
        ("deepseek_v2", "MLA"),
        ("deepseek_v3", "MLA"),
        ("kimi_linear", "MLA"),
        ("falcon_h1", "no layer that keeps the keys and values of every token"),
        ("diffllama", "values of one head with the keys of another"),
        ("jetmoe", "repeats its keys and values"),
        ("doge", "mask from the values"),
        ("hrm_text", "not filled by one self-attention module each"),
        ("mllama", "not filled by one self-attention module each"),
    ],
)
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_a_model_that_cannot_be_right_is_refused_with_its_reason(family, reason, name):
    with pytest.raises(UnsupportedModelError, match=reason):
        EvictingCache(build(family), name, budget=BUDGET)


@pytest.mark.parametrize(
    ("family", "options"), [("bert", {"is_decoder": False}), ("gemma3_text", {"use_bidirectional_attention": True})]
)
def test_a_model_that_attends_to_both_sides_is_refused(family, options):
    with pytest.raises(UnsupportedModelError, match=r"both sides.*is_decoder=True"):
        EvictingCache(build(family, **options), "h2o", budget=BUDGET)


@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_a_decoder_that_is_given_an_encoders_output_is_refused_by_the_first_update(name):
    """transformers would store what belongs to the encoder among the decoder's own tokens."""
    model = build("bart")
    cache = EvictingCache(model, name, budget=BUDGET)
    given = {host.cache_argument(model): cache, "encoder_hidden_states": torch.rand(1, 5, 64)}
    with pytest.raises(WrongModelError):
        model(text(1, PROMPT), **given)


# -- learned positions end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "limit"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_past_the_last_learned_position_the_embedding_raises_and_the_cache_is_as_before(family, limit, name):
    model = build(family, **{limit: 24})
    cache = EvictingCache(model, name, budget=BUDGET)
    ids = text(length=26)
    loop(model, cache, blocks_of(ids[:, :24], [20, 1, 1, 2]))
    before = [positions.tolist() for positions in kept(cache)]
    for beyond in (1, 2):
        with pytest.raises(IndexError, match="index out of range"):
            forward(model, cache, ids[:, 24 : 24 + beyond])
    assert [layer.get_seq_length() for layer in cache.layers] == [24, 24]
    assert [positions.tolist() for positions in kept(cache)] == before
    cache.reset()
    assert torch.isfinite(loop(model, cache, [ids[:, :20]])[0]).all()


# -- text backbones of vision-language models ------------------------------------------------------------------------

IMAGE, IMAGE_TOKENS = 98, 4
TEXT = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip  # one config


def _llava() -> tuple[Any, dict[str, Any]]:
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              image_size=8, patch_size=4, projection_dim=32)  # fmt: skip  # one config
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE,
                         image_seq_length=IMAGE_TOKENS)  # fmt: skip  # one config
    return LlavaForConditionalGeneration(config), {"pixel_values": torch.rand(1, 3, 8, 8)}


def _qwen2_vl() -> tuple[Any, dict[str, Any]]:
    vision = {"embed_dim": 32, "depth": 1, "num_heads": 2, "hidden_size": 64, "patch_size": 4, "mlp_ratio": 2}
    words = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    config = Qwen2VLConfig(vision_config=vision, text_config=words, image_token_id=IMAGE, video_token_id=99,
                           vision_start_token_id=100, vision_end_token_id=101)  # fmt: skip  # one config
    grid = torch.tensor([[1, 4, 4]])  # 16 patches, of which the merger makes 4 tokens
    kinds = torch.zeros(1, PROMPT, dtype=torch.long)
    kinds[:, 3 : 3 + IMAGE_TOKENS] = 1
    return Qwen2VLForConditionalGeneration(config), {
        "pixel_values": torch.rand(16, 3 * 2 * 4 * 4), "image_grid_thw": grid, "mm_token_type_ids": kinds
    }  # fmt: skip  # one dict


def _with_image(make: Any) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A vision-language model, a prompt with an image early in it, and the image."""
    torch.manual_seed(0)
    model, image = make()
    ids = text(1, sum(BLOCKS))
    ids[:, 3 : 3 + IMAGE_TOKENS] = IMAGE
    return sharpened(model), ids, image


@pytest.mark.parametrize("make", [_llava, _qwen2_vl])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm"])
def test_with_room_a_vision_language_model_answers_as_with_dynamic_cache(make, name):
    model, ids, image = _with_image(make)
    ids = ids[:, :PROMPT]
    mask = torch.ones_like(ids)
    expected = generate(model, ids, DynamicCache(config=host.decoder_config(model)), mask, new=6, **image)
    got = generate(model, ids, EvictingCache(model, name, budget=ROOM), mask, new=6, **image)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(map(torch.equal, got.logits, expected.logits))


@pytest.mark.parametrize("make", [_llava, _qwen2_vl])
@pytest.mark.parametrize("name", ["h2o", "random"])
@pytest.mark.parametrize("positions", [False, True], ids=["own-positions", "position-ids"])
def test_evicting_text_and_image_tokens_equals_the_reference(make, name, positions):
    model, ids, image = _with_image(make)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    blocks = blocks_of(ids, BLOCKS)
    cache = EvictingCache(model, name, budget=BUDGET)
    got, held = testing.run(model, cache, blocks, position_ids=positions, first=image)
    expected = testing.replay(eager, held, blocks, position_ids=positions, first=image)
    assert largest_error(got, expected, blocks) < 5 * NOISE
    assert cache.stored == [BUDGET, BUDGET]
    other = testing.replay(eager, held, blocks, position_ids=positions, first={
        **image, "pixel_values": 1 - image["pixel_values"]})  # fmt: skip  # one call
    assert largest_error(got, other, blocks) > 100 * NOISE  # the image is looked at
