"""The configs that are shipped run, at a small size on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from kvevict.cli import main
from kvevict.plan import Source, load_plan
from kvevict.policies import POLICIES
from kvevict.results import read_rows
from kvevict.sweep import run_plan

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    path = tmp_path / "articles.txt"
    path.write_text(" = One = \n\n" + "The cat sat on a mat and saw a dog. " * 4)
    return path


def test_there_is_a_config_for_each_policy_and_for_each_kind_of_study():
    assert {path.stem for path in CONFIGS} == {*POLICIES, "wikitext", "pg19", "needle", "quick", "table"}
    for name in POLICIES:
        choices = load_plan(next(path for path in CONFIGS if path.stem == name)).policies
        assert choices[0].name == name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_run_at_a_small_size(path, folder, articles, tmp_path, capsys):
    plan = load_plan(path)
    if plan.measure == "needle":
        small = dataclasses.replace(plan.needle, tasks=("fact",), lengths=(300,), depths=(0.5,))
        plan = dataclasses.replace(plan, models=(str(folder),), needle=small, texts=(Source("noise"),), budgets=(128,))
        plan = dataclasses.replace(plan, protections=plan.protections[:1])
        rows = run_plan(plan, tmp_path / "out").rows
        assert [case["task"] for case in rows[0]["cases"]] == ["fact"]
    else:
        config = tmp_path / path.name
        config.write_text(json.dumps({**yaml.safe_load(path.read_text()), "budgets": [64]}))
        tokens = "70" if plan.protocols[0].chunk == 1 else "100"  # the fewest that exceed a budget of 64
        options = ["--model", str(folder), "--text", str(articles), "--tokens", tokens, "--limit", "1"]
        assert main(["sweep", str(config), *options, "--output", str(tmp_path / "out")]) == 0
        assert "Written:" in capsys.readouterr().out
        rows = read_rows(tmp_path / "out")
    asked = {choice.name for choice in plan.policies} if plan.policies is not None else set(POLICIES)
    assert {row["policy"].partition("(")[0] for row in rows} == {"full cache", *asked}
    evicted = [row for row in rows if row["budget"] == 64 and row["policy"] not in ("full", "full cache")]
    assert all(row["predicted_after_budget"] > 0 for row in evicted if plan.measure == "perplexity")
