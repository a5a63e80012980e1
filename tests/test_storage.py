"""Copies, pickles and files of a cache continue exactly where it stood."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    BUDGET,
    HEADS,
    NOISE,
    VOCABULARY,
    alone_and_padded,
    blocks_of,
    every_implementation,
    every_policy,
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
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

from kvevict import EvictingCache, Held, ObservationError, Policy, WrongModelError, detach
from kvevict.errors import OutputError, StoredCacheError

SIZES = (20, 1, 1, 6, 1)


def _filled(model: Any, policy: Any, budget: float = BUDGET, padded: bool = False) -> tuple[EvictingCache, Any, Any]:
    """A cache after a few forwards, the blocks that follow, and the mask."""
    ids = text(3 if padded else 1, 40)
    mask = ragged_mask(40) if padded else None
    cache = EvictingCache(model, policy, budget=budget)
    blocks = blocks_of(ids, [*SIZES, 1, 4, 1, 1, 4])
    loop(model, cache, blocks[: len(SIZES)], mask, positions=True)
    return cache, blocks[len(SIZES) :], mask


def _rest(model: Any, cache: EvictingCache, blocks: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    done, logits = cache.get_seq_length(), []
    for block in blocks:
        done += block.shape[1]
        logits.append(forward(model, cache, block, None if mask is None else mask[:, :done], positions=True))
    return logits


def _assert_continues(model: Any, copied: EvictingCache, cache: EvictingCache, blocks: Any, mask: Any) -> None:
    assert repr(copied).split(", ")[:3] == repr(cache).split(", ")[:3]
    for one, other in zip(_rest(model, copied, blocks, mask), _rest(model, cache, blocks, mask), strict=True):
        assert (one - other).abs().max() < NOISE, (one - other).abs().max()
    assert all(torch.equal(*pair) for pair in zip(kept(copied), kept(cache), strict=True))


# -- files ---------------------------------------------------------------------------------------------------------


@every_policy
@every_implementation
@alone_and_padded
@pytest.mark.parametrize("budget", [BUDGET, 0.4])
def test_a_saved_cache_continues_like_the_one_it_was_saved_from(name, implementation, padded, budget, tmp_path):
    model = tiny(implementation)
    cache, blocks, mask = _filled(model, small(name), budget, padded)
    cache.save(tmp_path / "prompt")
    loaded = EvictingCache.load(model, tmp_path / "prompt")
    assert loaded.policy == cache.policy and loaded.budget == budget
    assert loaded.nbytes <= cache.nbytes
    _assert_continues(model, loaded, cache, blocks, mask)


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, layer_types=kinds,
        sliding_window=5)  # fmt: skip  # one config
    return sharpened(Gemma3ForCausalLM(config))


def _qwen3_next() -> Any:
    config = Qwen3NextConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"])  # fmt: skip  # one config
    return Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize("make", [_gemma3, _qwen3_next], ids=["sliding", "linear"])
def test_layers_of_transformers_are_saved_with_it(make, tmp_path):
    torch.manual_seed(0)
    model = make()
    cache, blocks, mask = _filled(model, "h2o")
    cache.save(tmp_path)
    _assert_continues(model, EvictingCache.load(model, tmp_path), cache, blocks, mask)


def test_an_empty_cache_and_half_precision_can_be_saved(tmp_path):
    model = tiny(dtype=torch.bfloat16)
    EvictingCache(model, "snapkv", budget=64, recent=4).save(tmp_path)
    loaded = EvictingCache.load(model, tmp_path)
    assert loaded.get_seq_length() == 0 and loaded.policy.recent == 4
    loop(model, loaded, blocks_of(text(length=80), [70, 10]))
    loaded.save(str(tmp_path))  # over the old one
    assert EvictingCache.load(model, str(tmp_path)).layers[0].keys.dtype == torch.bfloat16


def test_the_files_hold_what_is_in_use_and_no_more(tmp_path):
    model = tiny()
    cache = EvictingCache(model, "random", budget=1000)
    loop(model, cache, blocks_of(text(length=33), [32, 1]))  # room for 64
    cache.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cache.safetensors", "cache.json"}
    assert (tmp_path / "cache.safetensors").stat().st_size < 3 * 2 * 33 * (2 * 16 * 4 + 8 + 8) + 10_000


@dataclass(frozen=True, kw_only=True)
class Oldest(Policy):
    """A user's own: keeps the oldest tokens."""

    twist: int = 1

    def score(self, held: Held) -> Tensor:
        return -held.positions * self.twist


def test_a_policy_of_the_users_own_is_asked_for(tmp_path):
    model = tiny()
    cache, blocks, mask = _filled(model, Oldest())
    cache.save(tmp_path)
    with pytest.raises(StoredCacheError, match=r"Oldest.*pass policy="):
        EvictingCache.load(model, tmp_path)
    with pytest.raises(StoredCacheError, match="not under"):
        EvictingCache.load(model, tmp_path, policy=small("h2o"))
    _assert_continues(model, EvictingCache.load(model, tmp_path, policy=Oldest()), cache, blocks, mask)


def test_options_other_than_the_saved_ones_are_refused(tmp_path):
    model = tiny()
    _filled(model, "h2o")[0].save(tmp_path)
    with pytest.raises(StoredCacheError, match=r"not under H2O\(.*recent=3"):
        EvictingCache.load(model, tmp_path, policy=small("h2o", recent=3))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: tiny(seed=1), "weights"),
        (lambda: tiny(dtype=torch.bfloat16), "dtype"),
        (lambda: tiny(num_hidden_layers=2), "shapes"),
        (_gemma3, "class"),
    ],
)
def test_a_cache_of_another_model_is_refused(other, what, tmp_path):
    filled = tiny()
    _filled(filled, "h2o")[0].save(tmp_path)
    model = other()
    before, tables = snapshot(model), registries()
    with pytest.raises(WrongModelError, match=what):
        EvictingCache.load(model, tmp_path)
    assert snapshot(model) == before and registries() == tables


def _damage(folder: Path, how: str) -> None:
    tensors, books = folder / "cache.safetensors", folder / "cache.json"
    if how == "no folder":
        for path in (tensors, books):
            path.unlink()
        folder.rmdir()
    elif how == "cut short":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif how == "not JSON":
        books.write_text("{")
    elif how == "no object":
        books.write_text("[]")
    elif how == "newer format":
        books.write_text(json.dumps({**json.loads(books.read_text()), "format": 2}))
    else:
        model = tiny()
        EvictingCache(model, "h2o", budget=BUDGET).save(folder / "other")
        (folder / "other" / "cache.json").replace(books)


@pytest.mark.parametrize("how", ["no folder", "cut short", "not JSON", "no object", "newer format", "mixed"])
def test_files_that_are_no_whole_cache_are_refused(how, tmp_path):
    model = tiny()
    _filled(model, "h2o")[0].save(tmp_path / "cache")
    _damage(tmp_path / "cache", how)
    with pytest.raises(StoredCacheError, match="cache"):
        EvictingCache.load(model, tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_an_error_and_the_cache_goes_on(tmp_path):
    model = tiny()
    cache, blocks, mask = _filled(model, "h2o")
    same = copy.deepcopy(cache)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="file"):
        cache.save(tmp_path / "file")
    _assert_continues(model, cache, same, blocks, mask)


# -- pickles -------------------------------------------------------------------------------------------------------


@every_policy
@every_implementation
def test_a_pickled_cache_continues_once_it_has_a_model(name, implementation):
    model = tiny(implementation)
    cache, blocks, mask = _filled(model, small(name))
    data = pickle.dumps(cache)
    copied = pickle.loads(data)
    assert len(data) < 300_000  # no model in it
    with pytest.raises(ObservationError, match=r"cache\.attach\(model\)"):
        forward(model, copied, blocks[0])
    assert copied.get_seq_length() == cache.get_seq_length()
    assert copied.attach(model) is copied
    _assert_continues(model, copied, cache, blocks, mask)


def test_a_pickled_cache_of_another_model_is_refused():
    filled = tiny()
    copied = pickle.loads(pickle.dumps(_filled(filled, "h2o")[0]))
    other = tiny(seed=1)
    before = snapshot(other)
    with pytest.raises(WrongModelError, match="weights"):
        copied.attach(other)
    assert snapshot(other) == before


def test_the_model_is_remembered_through_several_pickles_and_asked_for_where_it_is_gone():
    filled, other = tiny(), tiny(seed=1)
    cache = _filled(filled, "h2o")[0]
    twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(cache))))
    with pytest.raises(WrongModelError, match="weights"):
        twice.attach(other)
    del filled
    gc.collect()
    for left in (cache, pickle.loads(pickle.dumps(cache))):
        with pytest.raises(WrongModelError, match="is gone"):
            left.attach(other)


@pytest.mark.parametrize("how", ["save", "pickle"])
def test_a_cache_whose_forward_ended_halfway_is_not_kept(how, tmp_path):
    model = tiny()
    cache, blocks, _ = _filled(model, "h2o")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, blocks[0])
    handle.remove()
    with pytest.raises(ObservationError, match="ended halfway"):
        cache.save(tmp_path) if how == "save" else pickle.dumps(cache)
    assert not list(tmp_path.iterdir())


def test_a_shallow_copy_is_refused():
    model = tiny()
    with pytest.raises(NotImplementedError, match="deepcopy"):
        copy.copy(EvictingCache(model, "h2o", budget=BUDGET))


def test_rows_of_a_model_whose_layers_cannot_move_them_stay_where_they_are():
    torch.manual_seed(0)
    model = _qwen3_next()
    cache = EvictingCache(model, "h2o", budget=BUDGET)
    forward(model, cache, text(2, 20))
    if all(hasattr(layer, "batch_select_indices") for layer in cache.layers):
        cache.batch_select_indices(torch.tensor([1]))
        assert {len(positions) for positions in kept(cache)} == {1}
    else:
        with pytest.raises(NotImplementedError, match="batch_select_indices"):
            cache.batch_select_indices(torch.tensor([1]))
        assert {len(positions) for positions in kept(cache)} == {2}


def test_a_cache_of_a_detached_model_can_be_attached_again():
    model = tiny()
    cache, blocks, mask = _filled(model, "h2o")
    same = copy.deepcopy(cache)
    detach(model)
    cache.attach(model)
    same.attach(model)
    _assert_continues(model, cache, same, blocks, mask)
    with pytest.raises(WrongModelError, match="another model"):
        cache.attach(tiny())


# -- one prompt, many questions ------------------------------------------------------------------------------------


@every_policy
def test_many_questions_continue_one_compressed_prompt_each_as_if_it_were_the_first(name):
    model = tiny()
    prompt = text(length=30)
    cache = EvictingCache(model, small(name), budget=BUDGET)
    forward(model, cache, prompt)
    for seed in (2, 3, 4):
        question = torch.cat([prompt, text(length=5, seed=seed)], 1)
        fresh = EvictingCache(model, small(name), budget=BUDGET)
        forward(model, fresh, prompt)
        answers = [generate(model, question, each, new=6).sequences for each in (copy.deepcopy(cache), fresh)]
        assert torch.equal(*answers)
    assert cache.get_seq_length() == 30
