"""Which pictures a folder of results gives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvevict.results import read_parts, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

VALUES = {
    "perplexity": ("perplexity", "perplexity_after_budget"),
    "fidelity": ("kl", "top1_agreement"),
    "needle": ("match", "graded_recall"),
}


def figures_of(folder: Path) -> Iterator[tuple[str, Figure]]:
    """A name for the file, and the figure, for everything that can be drawn from the results in ``folder``.

    For each model, text, protocol and protection: the measures against the budget, or as bars at a
    single one; for one cache that reads the text
    from its start, the loss by position at each budget; for needles, a map for each cache. Raises OutputError if
    there are no results.
    """
    from kvevict.plots import by_budget, loss_by_position, needle_map

    for number, rows in enumerate(_groups(read_rows(folder))):
        measure = rows[0]["measure"]
        prefix = f"{number + 1}-"
        budgets = list(dict.fromkeys(row["budget"] for row in rows if row["budget"] is not None))
        for value in VALUES[measure] if budgets else ():
            name = f"{prefix}{value.replace('_', '-')}"
            if len(budgets) > 1:
                yield f"{name}-by-budget", by_budget(rows, value)
            else:
                yield f"{name}-budget-{budgets[0]}", _bars(rows, value)
        if measure == "needle":
            for row in rows:
                for value in VALUES[measure]:
                    yield f"{prefix}{_slug(row)}-{value.replace('_', '-')}-map", needle_map(row, value)
        elif "streaming" in rows[0]["protocol"]:
            for budget in budgets:
                shown = [row for row in rows if row["budget"] in (None, budget)]
                curves = {_label(row): [part["nats"] for part in read_parts(folder, row)] for row in shown}
                title = f"{rows[0]['model']} on {rows[0]['text']}\n{rows[0]['protocol']}, budget {budget}"
                yield f"{prefix}loss-by-position-budget-{budget}", loss_by_position(curves, budget, title)


def _groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that belong in one picture; the full cache's row is in the picture of every protection."""
    names = ("measure", "model", "text_sha256", "documents_by", "protocol")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        seed = row["seed"] if row["measure"] == "needle" else None  # another seed's needles are others
        groups.setdefault((*(row[name] for name in names), seed), []).append(row)
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
