"""The metric for evaluate: its inputs and outputs, and its formula at full budget."""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import byte_tokenizer, reader
from torch.nn import functional

from kvevict import EvictingCache, OptionError
from kvevict.evaluation import perplexity
from kvevict.metrics import CACHED_PERPLEXITY, text_perplexities

TEXTS = ["The cat sat on a mat and saw a dog.", "It ran.", "Why? Nobody knows, and nobody asked the cat about it."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a start token."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<end>"})
    tokenizer.save_pretrained(path)
    reader(len(tokenizer), max_position_embeddings=512).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return type(reader()).from_pretrained(folder).eval()


def original(model, texts: list[str], start: bool, max_length: int | None = None) -> list[float]:
    """The published metric's formula: one padded batch, the masked mean of shifted losses of each row, exp."""
    tokenizer = byte_tokenizer()
    rows = [([tokenizer.eos_token_id] if start else []) + tokenizer(text)["input_ids"] for text in texts]
    rows = [row[:max_length] for row in rows]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, :-1]
    losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return ((losses * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)).exp().tolist()


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("options", [{}, {"policy": "h2o", "budget": 200}, {"policy": "full", "budget": 8}])
def test_at_full_budget_it_is_the_original_s_formula(folder, model, start, options):
    found = text_perplexities(TEXTS, str(folder), add_start_token=start, **options)
    expected = original(model, TEXTS, start)
    assert found["perplexities"] == pytest.approx(expected, rel=1e-5)
    assert found["mean_perplexity"] == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_texts_are_cut_to_the_longest_length(folder, model):
    found = text_perplexities(TEXTS, str(folder), max_length=10)["perplexities"]
    assert found == pytest.approx(original(model, TEXTS, True, 10), rel=1e-5)


def test_a_policy_reads_each_text_through_a_cache_of_its_own(folder, model):
    found = text_perplexities(TEXTS, str(folder), policy="tova", budget=8, sinks=2, chunk=4)["perplexities"]
    tokenizer = byte_tokenizer()
    for text, value in zip(TEXTS, found, strict=True):
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(text)["input_ids"]])
        make = partial(EvictingCache, model, "tova", 8, sinks=2)
        assert value == pytest.approx(perplexity(model, ids, make, chunk=4).perplexity)
    assert found[0] != pytest.approx(original(model, TEXTS, True)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "h2o"}, "give both"),
        ({"budget": 8}, "give both"),
        ({"sinks": 4}, "sinks given without a policy"),
        ({"policy": "h20", "budget": 8}, "did you mean 'h2o'"),
    ],
)
def test_caches_that_cannot_be_made_are_refused(folder, options, message):
    with pytest.raises(OptionError, match=message):
        text_perplexities(TEXTS, str(folder), **options)


def test_texts_without_a_token_to_predict_are_refused(folder):
    with pytest.raises(OptionError, match="'a' has no token to predict"):
        text_perplexities(["a"], str(folder), add_start_token=False)
    with pytest.raises(OptionError, match="no texts"):
        text_perplexities([], str(folder))


@pytest.mark.skipif(importlib.util.find_spec("evaluate") is None, reason="the package evaluate is not installed")
def test_evaluate_loads_and_computes_it(folder, tmp_path, monkeypatch):
    import evaluate

    import kvevict.metrics.cached_perplexity.cached_perplexity  # noqa: F401 - its package hides nothing that it needs

    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    metric = evaluate.load(CACHED_PERPLEXITY, cache_dir=str(tmp_path / "cache"))
    found = metric.compute(predictions=TEXTS, model_id=str(folder), policy="tova", budget=8, chunk=4)
    assert found == text_perplexities(TEXTS, str(folder), policy="tova", budget=8, chunk=4)
    assert all(math.isfinite(value) for value in found["perplexities"])
    assert set(metric.features) == {"predictions"}
