"""StreamingLLM(positions="cache"): keys move to their place inside the cache, exactly, for ever, or it is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers import (
    BUDGET,
    HEADS,
    KV_HEADS,
    NOISE,
    VOCABULARY,
    blocks_of,
    every_implementation,
    forward,
    generate,
    kept,
    loop,
    ragged_mask,
    registries,
    sharpened,
    small,
    snapshot,
    text,
    tiny,
)
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvevict import EvictingCache, UnsupportedModelError
from kvevict.layer import EvictingLayer
from kvevict.policies import StreamingLLM
from kvevict.rope import EXACT_TYPES, rerotation_for
from kvevict.spec import Spec

SINKS = 4
ORIGINAL = 32  # positions that the tiny models were "trained" on
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip  # a table
every_exact_rope = pytest.mark.parametrize("rope", EXACT_TYPES)


def _model(rope: str, implementation: str = "sdpa", **options: Any) -> Any:
    return tiny(implementation, rope_parameters=ROPES[rope], max_position_embeddings=ORIGINAL, **options)


# -- the slow reference --------------------------------------------------------------------------------------------


class _Unrotated:
    """The paper's cache for one row: keys are kept as projected, and rotated at every forward to their place in it."""

    def __init__(self, model: Any, budget: int, front: int = SINKS) -> None:
        self.model, self.budget, self.front = model.model, budget, front
        self.head = model.lm_head
        self.seen = 0
        self.held = [[] for _ in self.model.layers]  # per layer: (position, key (H, D), value (H, D))

    @torch.no_grad()
    def __call__(self, block: Tensor) -> Tensor:
        hidden = self.model.embed_tokens(block[0])  # (Q, hidden)
        queries = hidden.shape[0]
        for layer, held in zip(self.model.layers, self.held, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query = attention.q_proj(normed).view(queries, HEADS, -1).transpose(0, 1)  # (heads, Q, D)
            keys = attention.k_proj(normed).view(queries, KV_HEADS, -1)
            values = attention.v_proj(normed).view(queries, KV_HEADS, -1)
            held.extend((self.seen + i, keys[i], values[i]) for i in range(queries))
            key = torch.stack([entry[1] for entry in held], 1)  # (H, L, D)
            value = torch.stack([entry[2] for entry in held], 1)
            places = torch.arange(len(held))[None]
            cos, sin = self.model.rotary_emb(hidden[None], places)
            _, key = apply_rotary_pos_emb(key[None], key[None], cos, sin)
            query, _ = apply_rotary_pos_emb(query[None], query[None], cos[:, -queries:], sin[:, -queries:])
            logits = query[0] @ key[0].repeat_interleave(HEADS // KV_HEADS, 0).transpose(-1, -2) * attention.scaling
            shown = torch.ones(queries, len(held), dtype=torch.bool).tril(len(held) - queries)
            weights = logits.masked_fill(~shown, -torch.inf).softmax(-1)
            mixed = weights @ value.repeat_interleave(HEADS // KV_HEADS, 0)
            hidden = hidden + attention.o_proj(mixed.transpose(0, 1).reshape(queries, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            front, rest = held[: self.front], held[self.front :]
            held[:] = front + rest[max(0, len(rest) - (self.budget - self.front)) :]
        self.seen += queries
        return self.head(self.model.norm(hidden))[None]


SIZES = (7, 1, 1, 1, 1, 6, 1, 1, 1, 9, *([1] * 60))  # ends at 89 tokens, nearly three times the trained length


@every_exact_rope
@every_implementation
def test_keys_stand_where_the_paper_puts_them(rope, implementation):
    model = _model(rope, implementation)
    reference = _Unrotated(model, BUDGET)
    cache = EvictingCache(model, "streaming_llm", budget=BUDGET, positions="cache")
    for block in blocks_of(text(length=sum(SIZES)), SIZES):
        expected = reference(block)
        got = forward(model, cache, block)
        # rotating twice instead of once costs a rounding more
        assert (got - expected).abs().max() < 2 * NOISE
    assert [entry[0] for entry in reference.held[0]] == cache.kept_positions(0)[0, 0].tolist()


@every_implementation
def test_a_protected_prompt_stands_before_the_rest_as_the_sinks_do(implementation):
    model = _model("default", implementation)
    prompt = SIZES[0]
    reference = _Unrotated(model, 2 * BUDGET, front=prompt)
    cache = EvictingCache(model, "streaming_llm", budget=2 * BUDGET, positions="cache", protect_prompt="whole")
    for block in blocks_of(text(length=sum(SIZES)), SIZES):
        assert (forward(model, cache, block) - reference(block)).abs().max() < 2 * NOISE
    assert cache.kept_positions(0)[0, 0, :prompt].tolist() == list(range(prompt))


@every_exact_rope
def test_original_positions_give_other_logits(rope):
    """The reference can tell the two apart."""
    model = _model(rope)
    blocks = blocks_of(text(length=sum(SIZES)), SIZES)
    got = loop(model, EvictingCache(model, "streaming_llm", budget=BUDGET), blocks)
    reference = _Unrotated(model, BUDGET)
    worst = max(float((reference(block) - logits).abs().max()) for block, logits in zip(blocks, got, strict=True))
    assert worst > 100 * NOISE


@every_implementation
def test_padded_rows_stand_where_they_would_alone(implementation):
    model = _model("default", implementation)
    lengths = (20, 13, 5)
    sizes = [20, 1, 1, 1, 6, *([1] * 20)]
    ids, mask = text(3, sum(sizes)), ragged_mask(sum(sizes), lengths)
    cache = EvictingCache(model, "streaming_llm", budget=BUDGET, positions="cache")
    alone = [_Unrotated(model, BUDGET) for _ in lengths]
    done = 0
    for block in blocks_of(ids, sizes):
        start, done = done, done + block.shape[1]
        logits = forward(model, cache, block, mask[:, :done], positions=True)
        for row, length in enumerate(lengths):
            first = max(start, 20 - length)
            expected = alone[row](ids[row : row + 1, first:done])
            assert (logits[row, first - start :] - expected[0]).abs().max() < 2 * NOISE


def test_a_partly_rotated_head_moves_only_the_rotated_part():
    options = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
               "vocab_size": VOCABULARY}  # fmt: skip  # one shape
    model = sharpened(GPTNeoXForCausalLM(GPTNeoXConfig(**options)))
    moved = rerotation_for(model)
    keys = torch.randn(1, KV_HEADS, 3, HEADS * 4)
    rotary = 2 * moved.frequencies.shape[0]
    assert rotary < keys.shape[-1]
    turned = moved.rotate(keys, torch.full(keys.shape[:-1], 5))
    assert torch.equal(turned[..., rotary:], keys[..., rotary:])
    assert not torch.allclose(turned[..., :rotary], keys[..., :rotary])


# -- for ever ------------------------------------------------------------------------------------------------------


@every_exact_rope
def test_nothing_drifts_in_ten_thousand_steps(rope):
    model = _model(rope)
    rotary = model.model.rotary_emb
    scaling = float(getattr(rotary, "attention_scaling", 1.0))
    policy = StreamingLLM(positions="cache")
    layer = EvictingLayer(Spec(policy, BUDGET, 1, rerotation_for(model)), 0)
    plain = torch.randn(1, KV_HEADS, 1, 16)

    def rotated(key: Tensor, position: int) -> Tensor:
        """The exact key at a position, in float64."""
        angles = rotary.inv_freq.double() * position
        cos, sin = torch.cat([angles, angles]).cos(), torch.cat([angles, angles]).sin()
        first, second = key.double().chunk(2, -1)
        return (key.double() * cos + torch.cat([-second, first], -1) * sin) * scaling

    steps = 10_000
    for position in range(steps):
        new = rotated(plain, position).float()
        keys, _ = layer.update(new, new)
        if position in (100, steps - 1):
            slots = layer.slot_positions[0, 0].tolist()
            oldest = position - (len(slots) - SINKS - 1)
            for sink in range(SINKS):
                got = keys[0, :, slots.index(sink)]
                expected = rotated(plain[:, :, 0], oldest - SINKS + sink)[0]
                # one float32 rounding when the key is stored and one when it is turned, whatever the step
                assert (got.double() - expected).abs().max() < 2e-6
                stored = layer.keys[0, :, slots.index(sink)]
                assert torch.equal(stored, rotated(plain, sink).float()[0, :, 0])  # never touched
        layer.settle()
    assert layer.kept_positions()[0, 0].tolist() == [0, 1, 2, 3, *range(steps - BUDGET + SINKS, steps)]


@every_exact_rope
@every_implementation
def test_text_may_outgrow_the_trained_length(rope, implementation):
    model = _model(rope, implementation)
    cache = EvictingCache(model, "streaming_llm", budget=BUDGET, positions="cache")
    out = generate(model, text(length=20), cache, torch.ones(1, 20, dtype=torch.long), new=3 * ORIGINAL)
    assert all(bool(torch.isfinite(logits).all()) for logits in out.logits)
    assert cache.get_seq_length() == 20 + 3 * ORIGINAL - 1 > 2 * ORIGINAL
    assert cache.stored == [BUDGET] * 3


def test_inside_the_cache_the_distance_no_longer_grows():
    """Two texts that end alike give the same logits wherever they end, but for float32 angles."""
    model = _model("default", num_hidden_layers=1)
    tail = text(length=40, seed=3)
    ends = []
    for filler in (0, 200):
        cache = EvictingCache(model, "streaming_llm", budget=BUDGET, positions="cache")
        head = torch.cat([tail[:, :SINKS], text(length=filler, seed=4)], 1)
        loop(model, cache, [head, *tail.split(1, 1)])
        ends.append(forward(model, cache, tail[:, :1]))
    assert (ends[0] - ends[1]).abs().max() < 100 * NOISE  # angles of 240 radians have 7 digits
    cache = EvictingCache(model, "streaming_llm", budget=BUDGET)
    loop(model, cache, [torch.cat([tail[:, :SINKS], text(length=200, seed=4)], 1), *tail.split(1, 1)])
    assert (ends[0] - forward(model, cache, tail[:, :1])).abs().max() > 1000 * NOISE


# -- with room, and refusals ---------------------------------------------------------------------------------------


@every_exact_rope
@every_implementation
def test_with_room_positions_in_the_cache_are_the_original_ones(rope, implementation):
    model = _model(rope, implementation)
    blocks = blocks_of(text())
    expected = loop(model, EvictingCache(model, "full"), blocks)
    cache = EvictingCache(model, "streaming_llm", budget=64, positions="cache")
    assert all(torch.equal(*pair) for pair in zip(loop(model, cache, blocks), expected, strict=True))


def test_the_tokens_kept_do_not_depend_on_positions():
    model = _model("default")
    caches = [EvictingCache(model, "streaming_llm", budget=BUDGET, positions=p) for p in ("original", "cache")]
    for cache in caches:
        loop(model, cache, blocks_of(text()))
    assert all(torch.equal(*pair) for pair in zip(*map(kept, caches), strict=True))


def _longrope() -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": ORIGINAL}  # fmt: skip  # one table
    return Phi3ForCausalLM(Phi3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2,
        vocab_size=VOCABULARY, rope_parameters=rope, max_position_embeddings=4 * ORIGINAL,
        original_max_position_embeddings=ORIGINAL, pad_token_id=0))  # fmt: skip  # one model


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _model("dynamic"), ["LlamaForCausalLM", "dynamic", *EXACT_TYPES]),
        (_longrope, ["Phi3ForCausalLM", "longrope", *EXACT_TYPES]),
        (_gpt2, ["GPT2LMHeadModel", "rotary"]),
    ],
    ids=["dynamic", "longrope", "gpt2"],
)
@every_implementation
def test_what_cannot_be_exact_is_refused_by_name(make, words, implementation):
    model = make()
    model.set_attn_implementation(implementation)
    before, tables = snapshot(model), registries()
    with pytest.raises(UnsupportedModelError) as caught:
        EvictingCache(model, "streaming_llm", budget=BUDGET, positions="cache")
    for word in [*words, "positions='cache'", "use positions='original'"]:
        assert word in str(caught.value)
    assert snapshot(model) == before
    assert registries() == tables
    loop(model, EvictingCache(model, "streaming_llm", budget=BUDGET), blocks_of(text()))  # the advice works


def test_a_rotation_that_the_models_own_code_does_not_confirm_is_refused(monkeypatch):
    module = sys.modules[type(tiny().model.rotary_emb).__module__]

    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            even, odd = x[..., ::2], x[..., 1::2]
            half = cos.shape[-1] // 2
            c, s = cos[:, None, :, :half], sin[:, None, :, :half]
            return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

        return turn(q), turn(k)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", interleaved)
    with pytest.raises(UnsupportedModelError, match="did not give the keys of the new position"):
        EvictingCache(tiny(), small("streaming_llm", positions="cache"), budget=BUDGET)
