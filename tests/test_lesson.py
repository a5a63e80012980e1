"""The lesson runs, says what was measured, and draws what it says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import save_reader
from transformers import LlamaForCausalLM

from kvevict import host
from kvevict.bootstrap import Interval

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "lesson.py"
BUDGET = 16

pytestmark = pytest.mark.skipif(
    host.cache_argument(LlamaForCausalLM) != "cache", reason="examples are written for transformers 5.23 and later"
)


@pytest.fixture(scope="module")
def lesson() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def toy(lesson) -> dict:
    """What the small GPT's caches gave for two random texts."""
    texts = list(torch.randint(1000, (2, 4 * BUDGET), generator=torch.Generator().manual_seed(0)))
    return lesson["read"](lesson["small_gpt"](4 * BUDGET), texts, BUDGET)


def test_the_lesson_walks_through_both_systems(tmp_path, monkeypatch, capsys):
    model = save_reader(tmp_path / "model")
    picture = tmp_path / "lesson.png"
    options = ["--text", str(ROOT / "README.md"), "--tokens", "80", "--budget", str(BUDGET), "--draws", "2"]
    monkeypatch.setattr(sys, "argv", ["lesson.py", "--model", str(model), *options, "--output", str(picture)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    for cache in ("full", "sliding window", "StreamingLLM", "H2O"):
        assert printed.count(f"\n{cache:16} ") == 2
    assert printed.count("What this can show") == printed.count("What it cannot show") == 2
    assert "2 random texts of 64 tokens" in printed and "the first 80 tokens of README.md" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bounded_caches_hold_a_quarter_and_cost_the_same_until_they_are_full(lesson, toy):
    full = toy["full"][0]
    for name in lesson["CACHES"]:
        assert full.held_bytes / 5 < toy[name][0].held_bytes < full.held_bytes / 3
        torch.testing.assert_close(toy[name][0].nll[:BUDGET], full.nll[:BUDGET], rtol=0, atol=1e-5)
        assert not torch.equal(toy[name][0].nll[BUDGET + 1 :], full.nll[BUDGET + 1 :])
    assert lesson["same_until"](toy, BUDGET).startswith("their losses")


def test_no_cache_beats_chance_on_random_text(lesson, toy):
    assert all(950 < lesson["total"](results) < 1100 for results in toy.values())


def test_a_claim_is_yes_no_or_cannot_tell(lesson):
    above, below, around = (Interval(mid, mid - 1, mid + 1, "") for mid in (2.0, -2.0, 0.0))
    verdicts = [([above, above], "yes"), ([above, below], "no"), ([above, around], "cannot tell")]
    for gaps, verdict in verdicts:
        assert lesson["said"]("a claim", gaps).split(" ")[-len(verdict.split()) :] == verdict.split()


def test_attention_of_random_weights_is_spread_nearly_evenly(lesson):
    model = lesson["small_gpt"](64)
    kind = model.config._attn_implementation
    line = lesson["where_attention_goes"](model, torch.arange(64), BUDGET)
    assert "11% is on the first 4 tokens" in line and "the first 4 would get 11%" in line  # mean of 4 / seen
    assert model.config._attn_implementation == kind


def test_the_chart_shows_the_printed_numbers(lesson, toy):
    figure = lesson["chart"]({"one": toy, "two": toy}, BUDGET)
    for axes in figure.axes:
        assert [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()] == list(toy)
        assert [bar.get_height() for bar in axes.patches] == [lesson["total"](results) for results in toy.values()]
        assert axes.get_ylabel() == "Perplexity (lower is better)"
    printed = lesson["table"](toy)
    assert all(text.get_text() in printed for text in figure.axes[0].texts)
