"""Which pictures a folder of results gives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvevict import growth
from kvevict.bench import FILE, read
from kvevict.errors import OutputError
from kvevict.kept import HEADS, HELD, read_kept, read_tokens
from kvevict.results import RESULTS, read_parts, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

VALUES = {
    "perplexity": ("perplexity", "perplexity_after_budget"),
    "fidelity": ("kl", "top1_agreement"),
    "needle": ("match", "graded_recall"),
    "diagnostics": ("retained", "recall", "missed_per_eviction"),
}


def figures_of(results: Path) -> Iterator[tuple[str, Figure]]:
    """A name for the file, and the figure, for everything that can be drawn from ``results``.

    results: a folder that a command wrote, or the bench.json of kvevict bench.

    For each model, text, protocol and protection: the measures against the budget, or as bars at a single one; for one
    cache that reads the text from its start, the loss by position at each budget; for needles, a map for each cache;
    for diagnostics, what is kept by head, age, token and step, and policies beside the oracle; for a recorded
    generation, memory and speed; for the bench, a picture for each section. Raises OutputError if there are no results.
    """
    measured = results / FILE if results.is_dir() else results
    if measured.is_file():
        from kvevict.timings import charts_of

        for name, figure in charts_of(read(measured)):
            yield f"bench-{name}", figure
        if not (results / RESULTS).exists():
            return
    rows = read_rows(results)
    for row in rows:
        if row.get("measure") not in (*VALUES, growth.MEASURE):
            raise OutputError(
                f"{RESULTS} in {str(results)!r} has a row with the measure {row.get('measure')!r}, which no command "
                "here writes: give a folder that kvevict wrote"
            )
    try:
        for number, group in enumerate(_groups(rows)):
            for name, figure in _figures(results, group):
                yield f"{number + 1}-{name}", figure
    except KeyError as error:
        raise OutputError(f"a row of {RESULTS} in {str(results)!r} is damaged: it has no {error}") from error
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # of files edited or cut off
        raise OutputError(
            f"the results in {str(results)!r} are damaged and cannot be drawn ({type(error).__name__}: {error}): run "
            "the command that wrote them again"
        ) from error


def _figures(folder: Path, rows: list[Row]) -> Iterator[tuple[str, Figure]]:
    from kvevict.plots import growth_curves

    measure = rows[0]["measure"]
    if measure == growth.MEASURE:
        yield "memory-and-speed", growth_curves(rows)
        return
    budgets = list(dict.fromkeys(row["budget"] for row in rows if row["budget"] is not None))
    yield from _against_budgets(rows, budgets)
    if measure == "needle":
        yield from _needles(rows)
    elif measure == "diagnostics":
        for budget in budgets:
            yield from _diagnostics(folder, rows, budget)
    elif "streaming" in rows[0]["protocol"]:
        yield from _losses(folder, rows, budgets)


def _against_budgets(rows: list[Row], budgets: list[Any]) -> Iterator[tuple[str, Figure]]:
    from kvevict.plots import by_budget

    for value in VALUES[rows[0]["measure"]] if budgets else ():
        name = value.replace("_", "-")
        if len(budgets) > 1:
            yield f"{name}-by-budget", by_budget([row for row in rows if row["budget"] is None or value in row], value)
        elif rows[0]["measure"] != "diagnostics":  # which shows the same beside the oracle
            yield f"{name}-budget-{budgets[0]}", _bars(rows, value)


def _needles(rows: list[Row]) -> Iterator[tuple[str, Figure]]:
    from kvevict.plots import needle_map

    for row in rows:
        for value in VALUES["needle"]:
            yield f"{_slug(row)}-{value.replace('_', '-')}-map", needle_map(row, value)


def _losses(folder: Path, rows: list[Row], budgets: list[Any]) -> Iterator[tuple[str, Figure]]:
    from kvevict.plots import loss_by_position

    for budget in budgets:
        shown = [row for row in rows if row["budget"] in (None, budget)]
        curves = {_label(row): [part["nats"] for part in read_parts(folder, row)] for row in shown}
        title = f"{rows[0]['model']} on {rows[0]['text']}\n{rows[0]['protocol']}, budget {budget}"
        yield f"loss-by-position-budget-{budget}", loss_by_position(curves, budget, title)


def _diagnostics(folder: Path, rows: list[Row], budget: int) -> Iterator[tuple[str, Figure]]:
    from kvevict.maps import raster, retained_by_head, survival_by_age, token_map
    from kvevict.plots import headroom, title_of

    shown = [row for row in rows if row["budget"] in (None, budget)]
    title = f"{title_of(shown[-1])}\nbudget {budget}"
    end = f"budget-{budget}"
    yield f"policies-and-oracle-{end}", headroom(shown)
    heads = [row for row in read_rows(folder, HEADS) if row["budget"] == budget and row["policy"] != "ceiling"]
    for value in ("retained", "recall"):
        yield f"{value}-by-layer-and-head-{end}", retained_by_head(heads, title, value)
    kept = {name: left for (name, at), left in read_kept(folder).items() if at == budget}
    yield f"survival-by-age-{end}", survival_by_age(kept, budget, title)
    yield f"kept-positions-{end}", raster(kept, title)
    tokens = read_tokens(folder)
    for row in read_rows(folder, HELD) if tokens else ():
        if row["budget"] == budget:
            name = f"tokens-held-{_slug(row)}-after-{row['seen']}"
            said = f"{row['policy']}, budget {budget}, after {row['seen']:,} tokens\n{title_of(row)}"
            yield name, token_map(tokens, row["heads"], row["kv_heads"], said)


def _groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that belong in one picture; the full cache's row is in the picture of every protection."""
    names = ("measure", "model", "text_sha256", "documents_by", "protocol")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        seed = row["seed"] if row["measure"] == "needle" else None  # another seed's needles are others
        groups.setdefault((*(row.get(name) for name in names), seed), []).append(row)
    split = []
    for group in groups.values():
        full = [row for row in group if row["budget"] is None]
        protections = list(dict.fromkeys(str(row["protection"]) for row in group if row["budget"] is not None))
        split += [
            full + [row for row in group if row["budget"] is not None and str(row["protection"]) == protection]
            for protection in protections
        ] or [full]
    return split


def _bars(rows: list[Row], value: str) -> Figure:
    from kvevict.plots import bars, title_of

    numbers = {_label(row): math.nan if row.get(value) is None else float(row[value]) for row in rows}
    full = next(_label(row) for row in rows if row["budget"] is None)
    title = f"{title_of(rows[-1])}\nbudget {rows[-1]['budget']}"
    return bars(numbers, numbers.pop(full), title, value)


def _label(row: Row) -> str:
    return str(row["policy"]) + (f" seed {row['seed']}" if "seed=" in row["options"] and row["seed"] else "")


def _slug(row: Row) -> str:
    name = row["policy"] if row["budget"] is None else f"{row['policy']} {row['budget']}"
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
