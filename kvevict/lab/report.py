"""One self-contained page: every policy stepped in lockstep over a trace, to look at."""

from __future__ import annotations

import base64
import html
import json
import sys
from array import array
from importlib.resources import files

import torch
from torch import Tensor

from kvevict.errors import OptionError
from kvevict.lab.harness import HEAVY, Log
from kvevict.lab.simulation import Simulation
from kvevict.lab.traces import Trace

LIMIT = 5_000_000
"""Bytes a page may have."""

STRONGEST = 96
"""Positions of each query whose attention is drawn, where the page has room: on decode-4096, all above the noise."""

POSITIONS = 2**16
"""Tokens a page can show: positions are stored in two bytes."""


def report(simulation: Simulation, trace: Trace, at: tuple[int, int] = (0, 0)) -> str:
    """The page for one KV head: a simulation that ran with ``log=at``, and the trace it ran on.

    at: (layer, KV head), as given to ``simulate``.
    Raises OptionError for a trace of too many tokens, or a simulation without logs.
    """
    if not simulation.logs:
        raise OptionError(f"this simulation wrote nothing down: simulate(…, log={at}) makes one that a page can show")
    if trace.length > POSITIONS:
        raise OptionError(f"{trace.name} has {trace.length} tokens, and a page can show {POSITIONS}: give a length")
    strongest = min(STRONGEST, trace.length)
    page = _page(simulation, trace, at, strongest)
    while len(page.encode()) > LIMIT and strongest > 8:
        strongest = max(8, strongest // 2)
        page = _page(simulation, trace, at, strongest)
    size = len(page.encode())
    if size > LIMIT:
        raise OptionError(
            f"the page would have {size / 1e6:.1f} MB, and {LIMIT / 1e6:.0f} is the most: choose fewer policies or "
            "budgets, or a shorter length"
        )
    return page


def _page(simulation: Simulation, trace: Trace, at: tuple[int, int], strongest: int) -> str:
    positions, roots = strongest_attention(trace, at, strongest)
    lanes = [
        {"name": name, "policy": simulation.row(name, budget).policy, "budget": budget, **_packed(log)}
        for (name, budget), log in simulation.logs.items()
    ]
    data = {
        "about": _about(simulation, trace, at),
        "length": trace.length,
        "first": trace.first,
        "steps": trace.steps,
        "own": trace.own,
        "group": trace.group,
        "heavy": HEAVY,
        "strongest": strongest,
        "positions": _base64(array("H", positions.flatten().tolist())),
        "roots": _base64(array("B", roots.flatten().tolist())),
        "lanes": lanes,
    }
    parts = {
        "title": html.escape(f"Policies on {simulation.settings['trace']}"),
        "table": _table(simulation, trace),
        "notes": "".join(f'<p class="quiet">{html.escape(note)}</p>' for note in simulation.notes),
        "data": json.dumps(data).replace("<", "\\u003c"),
    }
    page = files("kvevict.lab").joinpath("report.html").read_text("utf-8")
    for name, part in parts.items():
        page = page.replace("{{" + name + "}}", part)
    return page


def strongest_attention(trace: Trace, at: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    """Each query's most attended positions, and 255 times the roots of their weights: (steps, count) int64 twice.

    Weights are the mean over the query heads of one KV head, in the first run. What is not there has root 0.
    """
    layer, head = at
    positions = torch.zeros(trace.steps, count, dtype=torch.int64)
    roots = torch.zeros(trace.steps, count, dtype=torch.int64)
    for block in trace.blocks():
        rows = block.weights[layer * trace.runs, head].mean(0)  # (q, W)
        best = rows.topk(min(count, rows.shape[-1]), -1)
        steps = slice(block.start - trace.first, block.start - trace.first + len(rows))
        positions[steps, : best.indices.shape[-1]] = best.indices
        roots[steps, : best.indices.shape[-1]] = (255 * best.values.double().sqrt()).round().long().clamp(0, 255)
    return positions, roots


def totals(log: Log, trace: Trace) -> tuple[float, float]:
    """Retained mass and recall of a log: what the page shows at the last step."""
    first = trace.first + (1 if trace.own else 0)
    possible = trace.group * sum(min(HEAVY, seen) for seen in range(first, first + trace.steps))
    return sum(log.mass) / len(log.mass), sum(log.hits) / possible


def _packed(log: Log) -> dict[str, str]:
    return {
        "mass": _base64(array("f", log.mass)),
        "hits": _base64(array("H", log.hits)),
        "counts": _base64(array("H", map(len, log.evicted))),
        "evicted": _base64(array("H", (position for step in log.evicted for position in step))),
    }


def _base64(numbers: array[int] | array[float]) -> str:
    if sys.byteorder == "big":
        numbers.byteswap()  # browsers run on little-endian machines
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def _about(simulation: Simulation, trace: Trace, at: tuple[int, int]) -> str:
    settings = simulation.settings
    words = [str(settings[key]) for key in ("model", "text", "source") if key in settings]
    words.append(f"{trace.length} tokens")
    if trace.layers > 1 or trace.heads > 1:
        words.append(f"layer {at[0]}, KV head {at[1]} with {trace.group} query heads")
    if trace.runs > 1:
        words.append(f"seed {settings['seeds'][0]} of {len(settings['seeds'])}")
    elif "seeds" in settings:
        words.append(f"seed {settings['seeds'][0]}")
    return ", ".join(words)


def _table(simulation: Simulation, trace: Trace) -> str:
    """The numbers of the KV head and run that the page shows, which on a trace of one head are the whole table's."""
    budgets = simulation.settings["budgets"]
    header = ["policy", *(f"retained@{b}" for b in budgets), *(f"recall@{b}" for b in budgets)]
    lines = []
    for name in dict.fromkeys(name for name, _ in simulation.logs):
        both = [totals(simulation.logs[name, budget], trace) for budget in budgets]
        lines.append([name, *(f"{each[0]:.4f}" for each in both), *(f"{each[1]:.4f}" for each in both)])
    if (trace.layers, trace.runs, trace.heads) == (1, 1, 1):  # a bound that holds nothing has no lane
        lines += [line for line in simulation.cells()[1:] if line[0] not in {name for name, _ in simulation.logs}]
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<table id="results"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
