"""The benchmark of the adaptive-EMA design note: its two policies agree, its driver catches cheats, and it runs."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path

import pytest
import torch

from kvevict import PolicyError
from kvevict.lab.patterns import PATTERNS
from kvevict.lab.simulation import simulate
from kvevict.lab.traces import named_trace
from kvevict.policies import AdaptiveEMA

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "adaptive_ema_study.py"


@pytest.fixture(scope="module")
def study() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_the_dictionary_and_heap_keeps_about_what_ours_keeps_where_recency_does_not_decide(study):
    for name in ("uniform", "recency", "heavy-early", "heavy-late", "mixed"):
        trace = named_trace(name, length=120)
        retained, _, history = study["drive"](study["DictionaryAndHeap"](32), trace, 32)
        ours = simulate(trace, {"ours": AdaptiveEMA()}, [32], bounds=False).row("ours", 32)
        assert retained == pytest.approx(ours.retained, abs=0.01), name
        assert [len(held) for held in history] == [min(t + 1, 32) for t in range(120)]


def test_a_policy_that_names_what_it_does_not_hold_or_too_few_is_an_error(study):
    class Cheat(study["DictionaryAndHeap"]):
        def evict(self, count):
            return self.answer

    for answer in ([], [1000]):
        cheat = Cheat(8)
        cheat.answer = answer
        with pytest.raises(PolicyError, match=r"Cheat named .* at step 8: expected 1 of the positions that it holds"):
            study["drive"](cheat, named_trace("mixed", length=20), 8)


# it traces the function below, a pure one
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_the_compiled_policy_takes_part_when_asked(study, monkeypatch, request):
    request.addfinalizer(torch.compiler.reset)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    head, _, line = study["timings"]([16], [1], 20, compiled=True).splitlines()
    assert head.count("compiled") == 2 and line.startswith("| 16 | 1 |") and line.count("x |") == 3
    one, other = (study["Tensors"](16, 2, compiled=compiled) for compiled in (False, True))
    for position in range(17, 40):
        row = torch.rand(2, 1, 8, 1, 17, generator=torch.Generator().manual_seed(position)).softmax(-1)
        for each in (one, other):
            each.place(position)
            each.step(row)
            each.remove()
        assert torch.equal(one.held.positions, other.held.positions)


def test_the_study_prints_every_pattern_edge_case_and_size(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--budgets", "16", "--layers", "1", "2", "--steps", "20"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    for name in PATTERNS:
        assert f"| {name} |" in printed
    assert "| empty cache (first token) | 1 | 0 |" in printed
    assert "| budget boundary (exact fill) | 64 | 0 |" in printed
    assert "| rapid eviction (100 tokens, budget 5) | 5 | 95 |" in printed
    assert "| 16 | 1 |" in printed and "| 16 | 2 |" in printed
    assert printed.count("69.01%") == len(PATTERNS) + 2
