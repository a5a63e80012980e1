"""Tables from finished parts that are written out here: which is best, what ties, and what is printed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvevict.plan import Cell, make_plan
from kvevict.policies import make_policy
from kvevict.protocols import chunked
from kvevict.tables import Finished, Report

CASES = 12
KEY = {"model": "m", "text": "t", "text_sha256": "0", "documents_by": "whole", "tokens_most": None,
       "documents_most": None, "protocol": "p", "kvevict": "1", "torch": "2", "transformers": "3"}  # fmt: skip  # a row


def part(measure: str, name: str, piece: int, result: dict[str, Any], budget: int = 64, **protection: int) -> Finished:
    """A finished part of the full cache, or of a policy."""
    policy = None if name == "full cache" else make_policy(name, **protection)
    cell = Cell(name, policy, None if policy is None else budget, protection, 0, chunked(1))
    key = {**KEY, "measure": measure, "policy": name, "options": repr(policy), "budget": cell.budget,
           "protection": protection, "seed": 0}  # fmt: skip  # a row
    return Finished(cell, key, str(piece), result, {"seconds": 1.0})


def report(measure: str, finished: list[Finished]) -> Report:
    return Report(make_plan({"measure": measure}), finished, {}, {})


def reading(nats: float, tokens: int = 101) -> dict[str, Any]:
    """A document whose tokens all have the same loss."""
    size = tokens - 1
    return {"tokens": tokens, "nats": [nats] * size, "bytes": 4 * size, "words": size // 2, "held_bytes": 1024,
            "peak_bytes": 2048}  # fmt: skip  # one result


def found(match: float, logprob: float) -> dict[str, Any]:
    return {"task": "single", "kind": "numbers", "length": 64, "depth": 0.5, "match": match, "logprob": logprob,
            "logprob_without": -10.0}  # fmt: skip  # one result


def rows_of(measure: str, results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    parts = [part(measure, name, n, result) for name, each in results.items() for n, result in enumerate(each)]
    return {row["policy"]: row for row in report(measure, parts).rows}


def test_the_lowest_perplexity_is_best_and_a_difference_beyond_the_interval_is_none_of_a_tie():
    rows = rows_of("perplexity", {
        "full cache": [reading(1.0)] * CASES,
        "h2o": [reading(1.0 + 0.2 * (n % 2)) for n in range(CASES)],
        "tova": [reading(1.1)] * CASES,
        "random": [reading(1.3)] * CASES,
    })  # fmt: skip  # a row each
    assert rows["h2o"]["is_best"] or rows["tova"]["is_best"]  # 1.1 on average, both
    assert rows["h2o"]["tie_with_best"] and rows["tova"]["tie_with_best"]
    assert not rows["random"]["tie_with_best"] and rows["random"]["vs_best_low"] > 0
    assert rows["random"]["vs_best"] == pytest.approx(2.718281828**0.2 - 1)
    assert not rows["tova"]["tie_with_full"]
    assert rows["random"]["units"] == "12 documents"


def test_the_most_matches_are_best():
    rows = rows_of("needle", {
        "full cache": [found(1.0, -1.0)] * CASES,
        "h2o": [found(0.0, -10.0)] * CASES,
        "tova": [found(1.0, -2.0)] * CASES,
    })  # fmt: skip  # a row each
    assert rows["tova"]["is_best"] and not rows["h2o"]["is_best"]
    assert rows["h2o"]["vs_best"] == -1 and not rows["h2o"]["tie_with_best"]
    assert rows["h2o"]["graded_recall"] == 0 and rows["tova"]["graded_recall"] == pytest.approx(8 / 9)
    assert rows["full cache"]["graded_recall"] == 1 and "is_best" not in rows["full cache"]
    assert rows["h2o"]["units"] == "12 cases"


def test_policies_compete_at_the_same_budget_and_protection_only():
    parts = [part("perplexity", "full cache", 0, reading(1.0))]
    parts += [part("perplexity", "tova", 0, reading(1.0 + 1 / budget), budget) for budget in (32, 64)]
    parts += [part("perplexity", "h2o", 0, reading(1.5), 64), part("perplexity", "h2o", 0, reading(1.2), 64, sinks=4)]
    rows = report("perplexity", parts).rows
    assert [row.get("is_best") for row in rows] == [None, True, True, False, True]


def test_sums_over_documents_are_exponentiated_once():
    row = rows_of("perplexity", {"full cache": [reading(1.0, 11), reading(3.0, 31)]})["full cache"]
    assert row["nats"] == pytest.approx(10 * 1 + 30 * 3)
    assert row["perplexity"] == pytest.approx(2.718281828459045**2.5)
    assert row["bits_per_byte"] == pytest.approx(100 / 0.6931471805599453 / 160)
    assert row["word_perplexity"] == pytest.approx(2.718281828459045**5)


def test_numbers_that_cannot_be_had_are_null_and_a_dash():
    results = {"full cache": [reading(1.0) | {"bytes": None}], "tova": [reading(800.0) | {"bytes": None}]}
    parts = [part("perplexity", name, 0, each[0], budget=1000) for name, each in results.items()]
    made = report("perplexity", parts)
    rows = [json.loads(line) for line in made.files()["results.jsonl"].decode().splitlines()]
    assert rows[1]["perplexity"] is None  # e^800
    assert rows[1]["bits_per_byte"] is None and rows[1]["perplexity_after_budget"] is None
    assert "NaN" not in made.files()["results.jsonl"].decode()
    line = next(line for line in made.markdown().splitlines() if line.startswith("| tova"))
    assert line.split(" | ")[2:4] == ["–", "–"]


def test_rows_do_not_hold_what_differs_from_run_to_run():
    rows = report("perplexity", [part("perplexity", "full cache", 0, reading(1.0))]).files()["results.jsonl"].decode()
    assert "seconds" not in rows and "date" not in rows
