"""The example that switches H2O's and TOVA's differences: its ends are the two policies, and it prints every switch."""

from __future__ import annotations

import copy
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import KV_HEADS, save_reader, sharpened, text, tiny
from transformers import DynamicCache, LlamaForCausalLM

from kvevict import EvictingCache, host

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "h2o_or_tova.py"
BUDGET = 12
ROUNDING = 1e-3
"""Nats: many queries at once are added up in another order, and these losses are around 8."""

pytestmark = pytest.mark.skipif(
    host.cache_argument(LlamaForCausalLM) != "cache", reason="examples are written for transformers 5.23 and later"
)


@pytest.fixture(scope="module")
def example() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return sharpened(tiny())


@pytest.fixture(scope="module")
def documents() -> torch.Tensor:
    return text(3, 100)


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_the_two_ends_are_h2o_and_tova(example, model, documents, name, chunk):
    ours, theirs = (
        example["read"](model, documents, partial(EvictingCache, model, policy, BUDGET), chunk)
        for policy in (example[name.upper()], name)
    )
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


def test_drafts_read_token_by_token(example, model, documents):
    for policy in example["BETWEEN"]:
        drafts, steps = (
            torch.stack(example["read"](model, documents, partial(EvictingCache, model, policy, BUDGET), chunk))
            for chunk in (None, 1)
        )
        torch.testing.assert_close(drafts, steps, rtol=0, atol=ROUNDING)
    full = example["read"](model, documents, partial(DynamicCache, config=model.config))
    assert [len(losses) for losses in full] == [99] * 3
    assert not torch.allclose(torch.stack(full), drafts, atol=1e-2)


def test_an_ungrouped_model_reads_the_same_and_only_choices_per_head_differ(example, model, documents):
    def read(policy):
        return torch.stack(example["read"](model, documents, partial(EvictingCache, model, policy, BUDGET)))

    model = copy.deepcopy(model)
    full, tova, h2o = (read(policy) for policy in ("full", example["TOVA"], example["H2O"]))
    model = example["ungrouped"](model)
    with EvictingCache(model, "full", BUDGET) as cache:
        model(documents, cache=cache)
        assert cache.layers[0].keys.shape[1] == model.config.num_attention_heads > KV_HEADS
    torch.testing.assert_close(read("full"), full, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(read(example["TOVA"]), tova, rtol=0, atol=ROUNDING)
    assert not torch.allclose(read(example["H2O"]), h2o, atol=1e-2)


def test_each_switch_changes_what_is_kept(example, model, documents):
    read = [
        torch.stack(example["read"](model, documents, partial(EvictingCache, model, policy, BUDGET)))
        for policy in example["BETWEEN"]
    ]
    assert len(read) == 8
    assert not any(torch.equal(one, other) for place, one in enumerate(read) for other in read[:place])


def test_the_example_prints_every_cache_and_every_switch(tmp_path, monkeypatch, capsys):
    reader = save_reader(tmp_path / "model")
    options = ["--text", str(ROOT / "README.md"), "--documents", "2", "--tokens", "70", "--budget", str(BUDGET)]
    monkeypatch.setattr(sys, "argv", ["h2o_or_tova.py", "--model", str(reader), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "README.md, 2 documents of 70 tokens, one by one; budget 12" in printed
    for cache in ("all queries (H2O)", "newest query (TOVA)", "streaming_llm", "sliding_window", "full cache"):
        assert printed.count(f"\n| {cache} |") == 1
    assert printed.count(" → ") == 12
