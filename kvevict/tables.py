"""From finished parts to tables: sums over documents, intervals against the full cache and the best policy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvevict.bootstrap import FEWEST, Interval, paired_bootstrap
from kvevict.cache import human_bytes
from kvevict.plan import Cell, Plan
from kvevict.protocols import Protocol, outgrown
from kvevict.results import RESULTS, aligned_table, json_line, markdown_table
from kvevict.retrieval import graded_recall

Row = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """One finished part: its cell, what its result depends on, the piece's name, the result, and the run's timing."""

    cell: Cell
    key: dict[str, Any]
    piece: str
    result: dict[str, Any]
    timing: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What a finished plan gave, as rows, tables and files.

    notices: for texts that are not the ones asked for, why.
    """

    plan: Plan
    finished: list[Finished]
    left_out: dict[str, str]
    notices: dict[str, str]

    @cached_property
    def rows(self) -> list[Row]:
        """One row for each cell, model and text, in the plan's order. A number that cannot be had is NaN."""
        cells: dict[str, list[Finished]] = {}
        for part in self.finished:
            cells.setdefault(json_line(part.key), []).append(part)
        groups: dict[tuple[Any, ...], list[list[Finished]]] = {}
        for parts in cells.values():
            groups.setdefault(_matched(parts[0].key), []).append(parts)
        rows = [row for group in groups.values() for row in _group(self.plan.measure, group)]
        return rows

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """For each model, text and protocol: a title, the head, and the lines of its table."""
        sections: dict[str, list[Row]] = {}
        for row in self.rows:
            sections.setdefault(_title(row), []).append(row)
        head, cells = COLUMNS[self.plan.measure]
        return [(title, list(head), [cells(row) for row in rows]) for title, rows in sections.items()]

    def text(self) -> str:
        """The tables for a terminal."""
        lines = [line for title, head, cells in self.tables() for line in (title, aligned_table(head, cells), "")]
        return "\n".join([*lines, *self._notes()])

    def markdown(self) -> str:
        """The tables as Markdown."""
        lines = [f"# {self.plan.measure.capitalize()}", ""]
        for title, head, cells in self.tables():
            lines += [f"## {title}", "", markdown_table(head, cells)]
        lines += [f"- {note}" for note in self._notes()]
        return "\n".join(lines) + "\n"

    def files(self) -> dict[str, bytes]:
        """The contents of results.jsonl, results.md and timings.jsonl."""
        timings = [
            {"model": part.key["model"], "text": part.key["text"], "policy": part.cell.name, "budget": part.cell.budget,
             "seed": part.cell.seed, "piece": part.piece, **part.timing}
            for part in self.finished
        ]  # fmt: skip  # one row
        return {
            RESULTS: "".join(map(json_line, self.rows)).encode(),
            "results.md": self.markdown().encode(),
            "timings.jsonl": "".join(map(json_line, timings)).encode(),
        }

    def _notes(self) -> list[str]:
        units = sorted({row["units"] for row in self.rows if row.get("units")})
        first = self.rows[0]
        made = ", ".join(f"{name} {first[name]}" for name in ("kvevict", "torch", "transformers"))
        notes = []
        if units:
            notes.append(
                f"Intervals are 95 % paired bootstrap intervals over {' / '.join(units)}. A tie is a difference whose "
                'interval holds 0. "vs best" is against the best policy at the same budget and protection.'
            )
            if min(int(each.split()[0]) for each in units) < FEWEST:
                notes.append(f"Intervals over fewer than {FEWEST} units are too narrow: read more text.")
        notes += [f"{name} was left out: {reason}." for name, reason in self.left_out.items()]
        notes += [f"Text: {notice}." for notice in self.notices.values()]
        return [*notes, f"Made with {made}."]


def _matched(key: Row) -> tuple[Any, ...]:
    """What rows that are compared have in common; needles of another seed are other needles."""
    return (key["model"], key["text_sha256"], key["documents_by"], key["tokens_most"], key["documents_most"],
            key["protocol"], key["seed"] if key["measure"] == "needle" else None)  # fmt: skip  # one tuple


def _group(measure: str, cells: list[list[Finished]]) -> list[Row]:
    """The rows of one model, text and protocol, compared with its full cache and with the best at the same budget."""
    full = next(parts for parts in cells if parts[0].cell.policy is None)
    rows = [SUMMARIES[measure](parts, full) for parts in cells]
    rivals: dict[tuple[Any, str], list[int]] = {}
    for number, parts in enumerate(cells):
        cell = parts[0].cell
        if cell.policy is not None and cell.policy.evicts:
            rivals.setdefault((cell.budget, str(cell.protection)), []).append(number)
    for numbers in rivals.values():
        values = {number: VALUES[measure](cells[number]) for number in numbers}
        means = {number: float(torch.cat(each).double().mean()) for number, each in values.items()}
        better = max if measure == "needle" else min  # matches against losses
        best = better(means, key=lambda number: means[number])
        for number in numbers:
            interval = _paired(measure, values[number], values[best])
            rows[number] |= {"is_best": number == best, **_interval("vs_best", interval, measure)}
            rows[number]["tie_with_best"] = interval.tie
    return rows


def _paired(measure: str, first: Sequence[Tensor], second: Sequence[Tensor]) -> Interval:
    return paired_bootstrap(first, second, cases=measure == "needle")


def _interval(name: str, interval: Interval, measure: str) -> Row:
    """A difference with its ends; of perplexities as a ratio minus 1."""
    ends = {name: interval.difference, f"{name}_low": interval.low, f"{name}_high": interval.high}
    if measure == "perplexity":
        ends = {key: math.expm1(value) if value < 700 else math.inf for key, value in ends.items()}
    return {**ends, "units": interval.units}


# -- perplexity --------------------------------------------------------------------------------------------------


def _nats(parts: list[Finished]) -> list[Tensor]:
    return [torch.tensor(part.result["nats"]) for part in parts]


def _seen(parts: list[Finished]) -> Tensor:
    protocol = parts[0].cell.protocol
    assert isinstance(protocol, Protocol)  # only needles have none
    return torch.cat([protocol.seen(part.result["tokens"]) for part in parts])


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _text_figures(parts: list[Finished]) -> Row:
    """Losses and counts are summed over documents, and exponentiated once."""
    nats = torch.cat(_nats(parts)).double()
    total, count = float(nats.sum()), len(nats)
    sums = {}
    for name in ("bytes", "words"):
        each = [part.result[name] for part in parts]
        sums[name] = None if None in each else sum(each)
    return {
        "documents": len(parts),
        "predicted": count,
        "nats": total,
        "perplexity": _exp(total / count),
        "bits_per_byte": total / math.log(2) / sums["bytes"] if sums["bytes"] else math.nan,
        "word_perplexity": _exp(total / sums["words"]) if sums["words"] else math.nan,
        **{f"predicted_{name}": value for name, value in sums.items()},
    }


def _after(parts: list[Finished], budget: int | float) -> tuple[float, int]:
    """Perplexity of the tokens predicted after the budget was exceeded, and their number."""
    nats = torch.cat(_nats(parts)).double()[outgrown(_seen(parts), budget)]
    return (_exp(float(nats.mean())), len(nats)) if len(nats) else (math.nan, 0)


def _perplexity(parts: list[Finished], full: list[Finished]) -> Row:
    row = {**parts[0].key, **_text_figures(parts)}
    for name in ("held_bytes", "peak_bytes"):
        row[name] = max(part.result[name] for part in parts)
    budget = parts[0].cell.budget
    if budget is None:
        return row
    row["perplexity_after_budget"], row["predicted_after_budget"] = _after(parts, budget)
    row["full_perplexity"] = _text_figures(full)["perplexity"]
    row["full_perplexity_after_budget"], _ = _after(full, budget)
    interval = paired_bootstrap(_nats(parts), _nats(full))
    return {**row, **_interval("vs_full", interval, "perplexity"), "tie_with_full": interval.tie}


# -- fidelity ----------------------------------------------------------------------------------------------------


def _kl(parts: list[Finished]) -> list[Tensor]:
    return [torch.tensor(part.result["kl"]) for part in parts]


def _fidelity(parts: list[Finished], full: list[Finished]) -> Row:
    interval = paired_bootstrap(_kl(parts), [torch.zeros_like(each) for each in _kl(parts)])
    agrees = [same for part in parts for same in part.result["agrees"]]
    lengths = [same for part in parts for same in part.result["same_tokens"]]
    return {
        **parts[0].key,
        **_text_figures(parts),
        **_interval("kl", interval, "fidelity"),
        "top1_agreement": sum(agrees) / len(agrees),
        "same_tokens": lengths,
        "same_tokens_median": statistics.median(lengths) if lengths else math.nan,
    }


# -- needles -----------------------------------------------------------------------------------------------------


def _matches(parts: list[Finished]) -> list[Tensor]:
    return [torch.tensor([float(part.result["match"])]) for part in parts]


def _needle(parts: list[Finished], full: list[Finished]) -> Row:
    interval = _paired("needle", _matches(parts), [torch.zeros(1)] * len(parts))
    cases = [
        {
            **{name: part.result[name] for name in ("task", "kind", "length", "depth", "match", "logprob")},
            "full_match": whole.result["match"],
            "full_logprob": whole.result["logprob"],
            "without_logprob": whole.result["logprob_without"],
        }
        for part, whole in zip(parts, full, strict=True)
    ]
    return {
        **parts[0].key,
        **_interval("match", interval, "needle"),
        "full_match": sum(case["full_match"] for case in cases) / len(cases),
        "graded_recall": recall_of(cases),
        "cases": cases,
    }


def recall_of(cases: Sequence[Row]) -> float:
    """The graded recall of some cases of a row."""
    columns = ([case[name] for case in cases] for name in ("logprob", "full_logprob", "without_logprob"))
    return graded_recall(*columns)


# -- columns of the tables -----------------------------------------------------------------------------------------


def _title(row: Row) -> str:
    seed = f", seed {row['seed']}" if row["measure"] == "needle" else ""
    return f"{row['model']} on {row['text']} ({_amount(row)}), {row['protocol']}{seed}"


def _amount(row: Row) -> str:
    if row["measure"] == "needle":
        cases = row["cases"]
        tasks, lengths = (list(dict.fromkeys(str(case[name]) for case in cases)) for name in ("task", "length"))
        return f"{len(cases)} case{'s' * (len(cases) > 1)} of {'/'.join(tasks)} in {'/'.join(lengths)} tokens"
    return f"{row['predicted']:,} predicted tokens, {row['documents']} document{'s' * (row['documents'] > 1)}"


def _names(row: Row) -> list[str]:
    protection = ", ".join(f"{name}={value}" for name, value in row["protection"].items())
    name = row["policy"] + (f" [{protection}]" if protection else "")
    seeded = "seed=" in row["options"] and row["seed"]
    return [name + (f" seed {row['seed']}" if seeded else ""), "" if row["budget"] is None else str(row["budget"])]


def _number(value: Any, form: str = ".2f") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def _with_interval(row: Row, name: str, form: str) -> str:
    value, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return ""
    shown = _number(value, form)
    return shown if low is None or not math.isfinite(low) else f"{shown} [{_number(low, form)}, {_number(high, form)}]"


def _versus(row: Row, against: str, form: str) -> str:
    """The difference with its interval, or "tie" before it."""
    if against == "best" and row.get("is_best"):
        return "best"
    shown = _with_interval(row, f"vs_{against}", form)
    return f"tie {shown}" if row.get(f"tie_with_{against}") else shown


def _perplexity_cells(row: Row) -> list[str]:
    return [
        *_names(row),
        _number(row["perplexity"]),
        _number(row["perplexity_after_budget"]) if "perplexity_after_budget" in row else "",
        _versus(row, "full", "+.1%"),
        _versus(row, "best", "+.1%"),
        _number(row["bits_per_byte"], ".3f"),
        _number(row["word_perplexity"], ".1f"),
        human_bytes(row["held_bytes"]),
        human_bytes(row["peak_bytes"]),
    ]


def _fidelity_cells(row: Row) -> list[str]:
    return [
        *_names(row),
        _with_interval(row, "kl", ".4f"),
        _versus(row, "best", "+.4f"),
        _number(row["top1_agreement"], ".1%"),
        _number(row["same_tokens_median"], ".0f"),
        _number(row["perplexity"]),
    ]


def _needle_cells(row: Row) -> list[str]:
    return [
        *_names(row),
        _with_interval(row, "match", ".0%"),
        _versus(row, "best", "+.0%"),
        _number(row["graded_recall"]),
    ]


SUMMARIES: dict[str, Callable[[list[Finished], list[Finished]], Row]] = {
    "perplexity": _perplexity,
    "fidelity": _fidelity,
    "needle": _needle,
}
VALUES: dict[str, Callable[[list[Finished]], list[Tensor]]] = {
    "perplexity": _nats,
    "fidelity": _kl,
    "needle": _matches,
}
COLUMNS: dict[str, tuple[Sequence[str], Callable[[Row], list[str]]]] = {
    "perplexity": (
        ("policy", "budget", "perplexity", "after budget", "vs full", "vs best", "bits/byte", "word perplexity", "held",
         "peak"),
        _perplexity_cells,
    ),
    "fidelity": (
        ("policy", "budget", "KL (nats)", "vs best", "top-1 agreement", "same greedy tokens (median)", "perplexity"),
        _fidelity_cells,
    ),
    "needle": (("policy", "budget", "string match", "vs best", "graded recall"), _needle_cells),
}  # fmt: skip  # heads beside their cells
