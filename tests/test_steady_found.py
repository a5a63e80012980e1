"""Decoding at a full cache where something is out of the ordinary, against the path that takes everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from helpers import BUDGET, NOISE, PROMPT, forward, kept, plain, small, text, tiny
from torch import Tensor

from kvevict import EvictingCache, Held, ObservationError, PolicyError, Rows, host, steady
from kvevict.policies import H2O, AdaptiveEMA, SlidingWindow, SnapKV
from kvevict.steady import Member, Ring

STEPS = 12


def _decode(model: Any, cache: EvictingCache, rows: int = 1, steps: int = STEPS) -> list[Tensor]:
    """Logits of a prompt and of decode steps."""
    ids = text(rows, PROMPT + steps)
    return [forward(model, cache, block) for block in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1))]


def _both_ways(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[EvictingCache], list[Tensor]], model: Any, policy: Any
) -> tuple[float, EvictingCache, EvictingCache]:
    """Runs in the steady state, then without one: the largest difference of their logits, and both caches."""
    ours = EvictingCache(model, policy, budget=BUDGET)
    got = run(ours)
    with monkeypatch.context() as patch:
        patch.setattr(steady, "begin", lambda layer: None)
        general = EvictingCache(model, policy, budget=BUDGET)
        expected = run(general)
    assert _kinds(general) == {"NoneType"}
    worst = max(float((one.float() - other.float()).abs().max()) for one, other in zip(got, expected, strict=True))
    return worst, ours, general


def _kinds(cache: EvictingCache) -> set[str]:
    """What the layers are in the steady state."""
    return {type(layer.steady).__name__ for layer in cache.evicting_layers}


def _same_tokens(one: EvictingCache, other: EvictingCache) -> bool:
    return all(torch.equal(*pair) for pair in zip(kept(one), kept(other), strict=True))


def _is_steady(cache: EvictingCache, name: str) -> bool:
    """Whether every layer takes the cheap step that this policy's layers take."""
    return _kinds(cache) == {{"sliding_window": "Ring", "random": "Alone"}.get(name, "Member")}


@pytest.mark.parametrize("name", ["h2o", "tova", "adaptive_ema"])
@pytest.mark.parametrize("layers", [1, 8, 9])
@pytest.mark.parametrize("rows", [1, 2])
def test_any_number_of_layers_decides_together(monkeypatch, name, layers, rows):
    model = tiny(num_hidden_layers=layers)
    worst, cache, general = _both_ways(monkeypatch, lambda c: _decode(model, c, rows), model, small(name))
    assert worst < 1e-3  # nine layers of weights four times as large add up the noise of each
    assert _same_tokens(cache, general)
    assert _is_steady(cache, name)


@pytest.mark.parametrize("name", ["h2o", "adaptive_ema", "sliding_window", "pyramidkv"])
def test_what_inference_mode_decoded_goes_on_outside_of_it(monkeypatch, name):
    model, steady_inside = tiny(), []

    def run(cache: EvictingCache) -> list[Tensor]:
        ids = text(1, PROMPT + 12)
        with torch.inference_mode():
            for block in (ids[:, :PROMPT], *ids[:, PROMPT : PROMPT + 6].split(1, 1)):
                model(block, **{host.cache_argument(model): cache})
            steady_inside.append(_is_steady(cache, name))
            kept(cache)
        return [forward(model, cache, block) for block in ids[:, PROMPT + 6 :].split(1, 1)]

    worst, cache, general = _both_ways(monkeypatch, run, model, small(name))
    assert worst < NOISE
    assert _same_tokens(cache, general)
    assert steady_inside == [True, False]
    assert _is_steady(cache, name)


@pytest.mark.parametrize("name", ["h2o", "sliding_window", "random"])
def test_a_step_whose_values_alone_carry_gradients_keeps_no_graph(name):
    model = tiny()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[0].self_attn.v_proj.weight.requires_grad_(True)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    _decode(model, cache)
    for token in text(1, 3, seed=2).split(1, 1):
        model(token, **{host.cache_argument(model): cache}).logits.sum().backward()
        assert not any(tensor.requires_grad for layer in cache.evicting_layers for tensor in layer.tensors())
    assert model.model.layers[0].self_attn.v_proj.weight.grad is not None


@pytest.mark.parametrize("name", ["h2o", "adaptive_ema", "random", "sliding_window"])
def test_autocast_may_come_and_go(monkeypatch, name):
    model, steady_before = tiny(), []

    def run(cache: EvictingCache) -> list[Tensor]:
        _decode(model, cache)
        steady_before.append(_is_steady(cache, name))
        ids = text(1, 8, seed=2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = [forward(model, cache, token) for token in ids[:, :4].split(1, 1)]
        return [*logits, *(forward(model, cache, token) for token in ids[:, 4:].split(1, 1))]

    worst, cache, general = _both_ways(monkeypatch, run, model, small(name))
    assert worst < 0.5  # bfloat16, as in test_contract
    assert _same_tokens(cache, general)
    assert steady_before == [True, False]
    assert _is_steady(cache, name)  # and again, once autocast is over


@dataclass(frozen=True, kw_only=True)
class NotANumber(H2O):
    """H2O that loses one number of the last row of the layer, from some token on."""

    name: ClassVar[str] = "not_a_number"
    stacks: ClassVar[bool] = True
    recent: int | None = 2

    def score(self, held: Held) -> Tensor:
        scores = held["score"].clone()
        if held.seen > PROMPT + 8:
            scores[-1] = float("nan")
        return scores


@pytest.mark.parametrize("rows", [1, 2])
def test_a_score_that_is_no_number_names_its_layer(rows):
    model = tiny()
    cache = EvictingCache(model, NotANumber(), budget=BUDGET)
    _decode(model, cache, rows, steps=8)
    assert isinstance(cache.evicting_layers[0].steady, Member)
    with pytest.raises(PolicyError, match="layer 2 with NaN"):
        forward(model, cache, text(rows, 1, seed=2))


@dataclass(frozen=True, kw_only=True)
class Watching(SlidingWindow):
    """A sliding window that counts the attention it is shown."""

    name: ClassVar[str] = "watching"
    seen: ClassVar[list[float]] = []

    @property
    def queries(self) -> int:
        """The newest."""
        return 1

    def observe(self, held: Held, rows: Rows) -> None:
        """Writes down that it was shown some."""
        self.seen.append(float(rows.weights.sum()))


def test_a_policy_by_age_that_reads_attention_is_shown_all_of_it():
    model = tiny()
    _decode(model, EvictingCache(model, Watching(), budget=BUDGET))
    assert len(Watching.seen) == (1 + STEPS) * model.config.num_hidden_layers
    plain = EvictingCache(model, SlidingWindow(), budget=BUDGET)
    _decode(model, plain)
    assert all(isinstance(layer.steady, Ring) for layer in plain.evicting_layers)


def _masked(module: Any, run: Callable[[], Tensor], columns: int) -> Tensor:
    """Runs while ``module`` alone is given a mask, which hides every third of the columns."""
    mask = torch.zeros(1, 1, 1, columns)
    mask[..., : columns - 1 : 3] = torch.finfo(torch.float32).min

    def give(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": mask}

    handle = module.register_forward_pre_hook(give, with_kwargs=True, prepend=True)
    try:
        return run()
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["sliding_window", "random", "h2o", "adaptive_ema"])
@pytest.mark.parametrize("number", [0, 1, 3, 9])
def test_one_layer_may_be_given_a_mask_in_the_middle(monkeypatch, name, number):
    model, steady_before = tiny(num_hidden_layers=10), []
    module = model.model.layers[number].self_attn

    def run(cache: EvictingCache) -> list[Tensor]:
        logits, ids = _decode(model, cache), text(1, 9, seed=2)
        steady_before.append(_is_steady(cache, name))
        for index, token in enumerate(ids.split(1, 1)):
            step = lambda token=token: forward(model, cache, token)  # noqa: E731 - one argument
            logits.append(_masked(module, step, cache.get_seq_length() + 1) if index in (2, 6) else step())
        return logits

    worst, cache, general = _both_ways(monkeypatch, run, model, small(name))
    assert worst < 1e-3  # as above
    assert _same_tokens(cache, general)
    assert steady_before == [True, False]
    assert "NoneType" not in _kinds(cache)  # the mask did not end it for good


@pytest.mark.parametrize("budget", [12, 0.4])
@pytest.mark.parametrize("every", [3, 20])
@pytest.mark.parametrize("prompt", [3, 11])
def test_tokens_that_go_together_are_the_same_alone_and_in_a_padded_batch(budget, every, prompt):
    """Protections that overlap, or whose tokens went before they were protected, count the same for both."""
    model = tiny(vocab_size=512)
    policy = H2O(evict_every=every, protect_prompt=0.5, sinks=1, recent=2)
    ids, longest = text(2, 40, vocabulary=512), 14
    mask = torch.ones_like(ids)
    mask[1, : longest - prompt] = 0
    together, alone = (EvictingCache(model, policy, budget=budget) for _ in range(2))
    for done in (longest, *range(longest + 1, 41)):
        start = 0 if done == longest else done - 1
        forward(model, together, ids[:, start:done], mask[:, :done], positions=True)
        forward(model, alone, ids[1:, max(start, longest - prompt) : done], positions=True)
        for one, other in zip(kept(together), kept(alone), strict=True):
            width = other.shape[-1]
            assert torch.equal(one[1:, :, :width], other)
            assert (one[1:, :, width:] == -1).all()


@dataclass(frozen=True, kw_only=True)
class Keeping(H2O):
    """H2O that keeps what it was shown, and what that was at the time."""

    name: ClassVar[str] = "keeping"
    shown: ClassVar[list[tuple[Rows, Tensor, Tensor]]] = []

    def observe(self, held: Held, rows: Rows) -> None:
        """As H2O, and keeps the rows."""
        self.shown.append((rows, rows.positions.clone(), rows.weights.clone()))
        super().observe(held, rows)


def test_rows_that_a_policy_keeps_stay_as_they_were_shown():
    model = tiny()
    _decode(model, EvictingCache(model, Keeping(), budget=BUDGET))
    assert len(Keeping.shown) >= 3 * STEPS
    for rows, positions, weights in Keeping.shown:
        assert torch.equal(rows.positions, positions)
        assert torch.equal(rows.weights, weights)


@dataclass(frozen=True, kw_only=True)
class Weighted(SnapKV):
    """SnapKV whose own helper reads what stacked layers do not show."""

    name: ClassVar[str] = "weighted"

    def _pooled(self, held: Held, end: int | Tensor) -> Tensor:
        assert held.values is not None
        return super()._pooled(held, end) * held.values.float().norm(dim=-1) * (1 + held.layer)


@dataclass(frozen=True, kw_only=True)
class Unequal(AdaptiveEMA):
    """Layers with less, as much and more than the average budget, each for itself."""

    name: ClassVar[str] = "unequal"
    consensus: ClassVar[bool] = False
    rebuild: float = 0.5

    def layer_budgets(self, budget: int, layers: int, prompt: int | None = None) -> list[int]:
        return [budget - 3, budget, budget + 3]


@pytest.mark.parametrize("policy", [Weighted(window=3, kernel=3), Unequal()], ids=["own helper", "unequal budgets"])
def test_a_policy_built_on_one_of_ours_decodes_as_on_the_general_path(monkeypatch, policy):
    model = tiny()
    worst, cache, general = _both_ways(monkeypatch, lambda c: _decode(model, c, steps=60), model, policy)
    assert worst < NOISE
    assert _same_tokens(cache, general)


SHOWN: list[Tensor] = []


@dataclass(frozen=True, kw_only=True)
class Counted(SlidingWindow):
    """A window that looks at every token that comes."""

    name: ClassVar[str] = "counted"

    def admit(self, new: Held) -> None:
        SHOWN.append(new.positions.clone())


def test_a_policy_that_looks_at_new_tokens_sees_each_of_them():
    SHOWN.clear()
    _decode(tiny(), EvictingCache(tiny(), SlidingWindow(), budget=BUDGET))  # which looks at none
    assert not SHOWN
    model = tiny()
    _decode(model, EvictingCache(model, Counted(), budget=BUDGET))
    assert [int(each.max()) for each in SHOWN[::3]] == [PROMPT - 1, *range(PROMPT, PROMPT + STEPS)]


def test_what_a_policy_computes_of_new_keys_keeps_no_graph():
    model = tiny()
    cache = EvictingCache(model, "key_norm", budget=BUDGET)
    for block in text(1, PROMPT + STEPS).split([PROMPT, *[1] * STEPS], 1):
        model(block, **{host.cache_argument(model): cache})  # with gradients
        assert not any(tensor.requires_grad for layer in cache.evicting_layers for tensor in layer.tensors())
    copy.deepcopy(cache)


@pytest.mark.parametrize("name", ["full", "tova", "streaming_llm"])
def test_a_prompt_under_autocast_goes_on_without_it_as_in_a_full_cache(name):
    model, ids = tiny(), text(1, PROMPT + 4)
    runs = []
    for cache in (plain(model), EvictingCache(model, name, budget=100)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            forward(model, cache, ids[:, :PROMPT])
        runs.append([forward(model, cache, token) for token in ids[:, PROMPT:].split(1, 1)])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_a_mask_that_does_not_grow_with_the_text_is_an_error(name, rows):
    model, ids = tiny(), text(rows, PROMPT + 2)
    mask = torch.ones(rows, PROMPT, dtype=torch.long)
    mask[-1, :4] = 0
    cache = EvictingCache(model, small(name), budget=BUDGET)
    forward(model, cache, ids[:, :PROMPT], mask)
    with pytest.raises(ObservationError, match=f"calls token {PROMPT} a pad in every row, after real tokens"):
        forward(model, cache, ids[:, PROMPT : PROMPT + 1], mask)
    cache.reset()
    forward(model, cache, ids[:, :PROMPT], mask)
    forward(model, cache, ids[:, PROMPT : PROMPT + 1], torch.cat([mask, mask.new_ones(rows, 1)], 1))
    assert int(cache.kept_positions(0)[0].max()) == PROMPT - 4 * (rows == 1)


def test_tokens_that_are_pads_in_all_rows_may_come_one_by_one_before_the_text():
    model, ids = tiny(), text(2, 6)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    cache = EvictingCache(model, small("h2o"), budget=BUDGET)
    for end in range(1, 7):
        forward(model, cache, ids[:, end - 1 : end], mask[:, :end])
    assert kept(cache)[0].max() == 2


@pytest.mark.parametrize("broken", ["mlp", "self_attn"])
@pytest.mark.parametrize("name", ["tova", "sliding_window", "random"])
def test_half_a_forward_is_not_copied(monkeypatch, name, broken):
    model = tiny()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("interrupted")

    def run(cache: EvictingCache) -> list[Tensor]:
        logits = _decode(model, cache)
        with monkeypatch.context() as patch:
            patch.setattr(getattr(model.model.layers[1], broken), "forward", fails)
            with pytest.raises(RuntimeError, match="interrupted"):
                forward(model, cache, text(1, 1))
        with pytest.raises(ObservationError):
            copy.deepcopy(cache)
        cache.reset()
        return logits

    _both_ways(monkeypatch, run, model, small(name))
