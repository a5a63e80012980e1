"""What policies do to a real model's attention: how much of it they keep, head by head, and what they give away.

Policies are replayed over a captured trace, as ``kvevict.lab.simulation`` does it, and compared with two bounds: a
clairvoyant that evicts the least future attention, and a random subset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvevict.bootstrap import FEWEST, paired_bootstrap
from kvevict.errors import OptionError
from kvevict.kept import HEADS, HELD, KEPT, TOKENS, held_by_heads, packed, survival
from kvevict.lab.history import History
from kvevict.lab.simulation import BOUNDS_NOTE, CEILING, MEASURES, ORACLE, RANDOM, Simulation, simulate
from kvevict.lab.traces import Trace
from kvevict.plan import FULL_CACHE
from kvevict.policies import POLICIES, Policy, Random, make_policy
from kvevict.results import RESULTS, aligned_table, json_line, markdown_table, save_files, versions

MEASURE = "diagnostics"
ABOUT = ("model", "revision", "dtype", "device", "text", "text_sha256")
"""What rows say of where a trace comes from, as far as the trace knows."""
BOUNDS = (ORACLE, RANDOM, CEILING)
MOST = 5
"""Tokens listed as the most missed."""

NOTES = (
    MEASURES,
    "Missed: the attention that an evicted token would have received from later queries, mean over evicted tokens; 1 "
    "is all that one query gives. Summed over evicted tokens, per query, it is what the full cache retains more.",
    f"Policy head-room is {ORACLE} - policy, budget head-room {FULL_CACHE} - {ORACLE}, both of retained mass. The "
    "oracle protects nothing and is greedy: a head-room below 0 is a policy that passes it.",
    BOUNDS_NOTE,
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Diagnosis:
    """Policies on one trace.

    rows:  one for the full cache, and one for each policy and bound at each budget.
    heads: the same for every layer and query head.
    held:  for each policy, budget and chosen step, how many KV heads of all layers hold each token.
    kept:  (name, budget): when each token left, (layers, KV heads, tokens) int; see ``kvevict.kept``.
    tokens: the text, token by token, for pictures; may be empty.
    """

    rows: list[Row]
    heads: list[Row]
    held: list[Row]
    kept: Mapping[tuple[str, int], Tensor]
    tokens: Sequence[str]
    left_out: dict[str, str] = field(default_factory=dict)

    def row(self, name: str, budget: int | None) -> Row:
        """One row; KeyError if there is none."""
        return {(row["policy"], row["budget"]): row for row in self.rows}[name, budget]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table: its head and its lines."""
        head = ["policy", "budget", "retained", "vs best", "recall", "vs best", "missed", "policy head-room"]
        return [*head, "budget head-room", "lowest head", "worst token"], [_cells(row) for row in self.rows]

    def text(self) -> str:
        """The table and its notes for a terminal."""
        return "\n".join([self._title(), aligned_table(*self.cells()), "", *self._notes()])

    def markdown(self) -> str:
        """The same as Markdown, with the tokens that are missed most."""
        lines = ["# Attention diagnostics", "", self._title(), "", markdown_table(*self.cells())]
        lines += ["Tokens whose later attention was missed most, mean over KV heads (position: token, missed):", ""]
        for row in self.rows:
            if row.get("most_missed"):
                said = "; ".join(
                    f"{each['position']}: {each['token']!r}, {each['missed']:.2f}" for each in row["most_missed"]
                )
                lines.append(f"- {row['policy']} at {row['budget']}: {said}")
        return "\n".join([*lines, "", *(f"- {note}" for note in self._notes())]) + "\n"

    def save(self, folder: str | Path) -> list[Path]:
        """Writes results.jsonl, results.md, heads.jsonl, held.jsonl, kept.npz and tokens.json; returns their paths.

        Each file is written whole or not at all. Raises OutputError.
        """
        contents = {
            KEPT: packed(self.kept),
            TOKENS: json_line(list(self.tokens)).encode(),
            HELD: "".join(map(json_line, self.held)).encode(),
            HEADS: "".join(map(json_line, self.heads)).encode(),
            "results.md": self.markdown().encode(),
            RESULTS: "".join(map(json_line, self.rows)).encode(),  # last: with it, results are there
        }
        return save_files(Path(folder).expanduser(), contents)

    def _title(self) -> str:
        first = self.rows[0]
        return f"{first['model']} on {first['text']} ({first['tokens']} tokens), {first['protocol']}"

    def _notes(self) -> list[str]:
        first = self.rows[0]
        made = ", ".join(f"{name} {first[name]}" for name in ("kvevict", "torch", "transformers"))
        left_out = [f"{name} was left out: {reason}." for name, reason in self.left_out.items()]
        units = next((row["units"] for row in self.rows if "units" in row), None)
        notes = list(NOTES)
        if units:
            notes.append(
                f'"vs best" is the difference from the best policy at the same budget, with its 95 % paired bootstrap '
                f"interval over the queries in {units}. A tie is a difference whose interval holds 0."
            )
            if int(units.split()[0]) < FEWEST:
                notes.append(f"Intervals over fewer than {FEWEST} blocks are too narrow: read more text.")
        return [*notes, *left_out, f"Made with {made}."]


def diagnose(
    trace: Trace,
    policies: Mapping[str, Policy] | Sequence[str | Policy] | None = None,
    budgets: Sequence[int] | None = None,
    *,
    steps: Sequence[int] | None = None,
    seed: int = 0,
    protection: Mapping[str, Any] | None = None,
    lenient: bool = False,
    layers: Sequence[int] | None = None,
    tokens: Sequence[str] = (),
    renormalize: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Replays policies over a captured ``trace``, one token per forward, and measures what each keeps of its attention.

    policies: as ``simulate`` takes them; None is every policy that evicts and that the smallest budget can hold.
    budgets:  tokens per KV head.
    steps:    after how many tokens to write down what is held; None is the end of the text.
    seed:     of the random control.
    protection: what all policies were told to keep, for the rows, and for a random control that is not among them.
    lenient:  leaves out what cannot run, also of the policies asked for.
    layers:   the trace's layers by their numbers in the model; None counts from 0.
    tokens:   the text, token by token.
    renormalize: shows policies rows that sum to one over what is held, as inside a model; see ``Lane``.
    progress: called with the number of steps done since its last call, all policies counted.

    Retained mass and recall are of the attention that the model gave with nothing evicted. Raises OptionError.
    """
    layers = list(range(trace.layers)) if layers is None else list(layers)
    steps = check_steps(steps, trace.length)
    if trace.runs != 1:
        raise OptionError(f"{trace.name} has {trace.runs} runs side by side: give a trace of one text")
    for name, given, wanted in (
        ("layers", layers, trace.layers),
        ("tokens", tokens or range(trace.length), trace.length),
    ):
        if len(given) != wanted:
            raise OptionError(f"{len(given)} {name} for a trace of {wanted}: give one for each, or leave them out")
    if policies is None:
        lenient, policies = True, [name for name in POLICIES if make_policy(name).evicts]
    options = dict(protection or {})
    if RANDOM not in policies:  # the control, with the seed that was asked for
        control = Random(seed=seed, **options)
        policies = {**policies, RANDOM: control} if isinstance(policies, Mapping) else [*policies, control]
    result = simulate(
        trace, policies, budgets, lenient=lenient, renormalize=renormalize, history=True, progress=progress
    )
    assert result.history is not None
    key = {**_key(trace, renormalize), "protection": options, "seed": seed}
    rows, heads = _rows(result, result.history, key, layers, tokens)
    kept = {cell: left[:, 0] for cell, left in result.history.left.items()}
    held = [
        {
            **_named(row),
            "seen": seen,
            "kv_heads": kept[cell].shape[0] * kept[cell].shape[1],
            "heads": held_by_heads(kept[cell], seen)[:seen].tolist(),
        }
        for row in rows
        for cell in [(row["policy"], row["budget"])]
        if cell in kept
        for seen in steps
    ]
    return Diagnosis(rows, heads, held, kept, tokens, result.left_out)


def check_steps(steps: Sequence[int] | None, length: int) -> list[int]:
    """The steps in order, None for the last one, or OptionError."""
    if steps is None:
        return [length]
    for step in steps:
        if not 1 <= step <= length:
            raise OptionError(f"step {step}: the text has {length} tokens; give from 1 to {length}")
    return sorted(set(steps))


# -- rows --------------------------------------------------------------------------------------------------------------


def _key(trace: Trace, renormalize: bool) -> Row:
    """What every row says of the model, the text and the replay."""
    shown = "rows that sum to one" if renormalize else "rows as they are"
    return {
        "measure": MEASURE,
        **{name: trace.about.get(name, "unknown") for name in ABOUT},
        "tokens": trace.length,
        "protocol": f"replay of the full cache's attention, token by token, {shown}",
        **versions(),
    }


def _rows(
    result: Simulation, history: History, key: Row, layers: list[int], tokens: Sequence[str]
) -> tuple[list[Row], list[Row]]:
    """The rows of all layers and heads together, and of each."""
    full = history.full[:, 0]  # (layers, H, G)
    group = full.shape[2]
    whole = full.flatten(1)  # (layers, heads)
    first = {**key, "kind": "full", "policy": FULL_CACHE, "options": "nothing is evicted", "budget": None}
    rows: list[Row] = [{**first, "retained": float(full.mean()), "recall": 1.0}]
    heads = _of_heads(first, layers, group, {"retained": whole, "recall": torch.ones_like(whole)})
    for lane in result.rows:
        kind = "bound" if lane.name in BOUNDS else "policy"
        own = {**key, "kind": kind, "policy": lane.name, "options": lane.policy, "budget": lane.budget}
        oracle = result.row(ORACLE, lane.budget)
        retained, best = torch.tensor(lane.by_head), torch.tensor(oracle.by_head)  # (layers, heads)
        by_head = {"retained": retained, "recall": torch.tensor(lane.recall_by_head)}
        by_head |= {"policy_headroom": best - retained, "budget_headroom": whole - best}
        layer, head = divmod(int(retained.argmin()), retained.shape[1])
        row = {
            **own,
            "retained": lane.retained,
            "recall": lane.recall,
            "policy_headroom": oracle.retained - lane.retained,
            "budget_headroom": rows[0]["retained"] - oracle.retained,
            "lowest_head": {"retained": float(retained.min()), "layer": layers[layer], "head": head},
        }
        if (lane.name, lane.budget) in history.left:  # the ceiling holds nothing from one query to the next
            left, later = (each[lane.name, lane.budget][:, 0] for each in (history.left, history.missed))
            row |= _fates(left, later, layers, tokens)
            missed = later.sum(-1) / (left > 0).sum(-1)  # (layers, H), NaN where nothing was evicted
            by_head["missed_per_eviction"] = missed.repeat_interleave(group, 1)
        rows.append(row)
        heads += _of_heads(own, layers, group, by_head)
    for budget in dict.fromkeys(row["budget"] for row in rows):
        rivals = [row for row in rows if row["kind"] == "policy" and row["budget"] == budget]
        if rivals:
            _compare(rivals, "retained", history.retained)
            _compare(rivals, "recall", history.recall)
    return rows, heads


def _compare(rivals: list[Row], measure: str, by_query: Mapping[tuple[str, int], Tensor]) -> None:
    """Adds to rows of one budget how far they are from the best of them, with the interval over queries."""
    best = max(rivals, key=lambda row: float(row[measure]))
    for row in rivals:
        first, second = ([by_query[each["policy"], each["budget"]][0]] for each in (row, best))
        interval = paired_bootstrap(first, second)
        name = f"{measure}_vs_best"
        row |= {name: interval.difference, f"{name}_low": interval.low, f"{name}_high": interval.high}
        row |= {f"{measure}_is_best": row is best, f"{measure}_tie_with_best": interval.tie, "units": interval.units}


def _named(row: Row) -> Row:
    """What a row says of where it comes from."""
    last = list(row).index("budget")
    return dict(list(row.items())[: last + 1])


def _fates(left: Tensor, later: Tensor, layers: list[int], tokens: Sequence[str]) -> Row:
    """What became of the tokens of one lane. left, later: (layers, H, length)."""
    gone = int((left > 0).sum())
    worst = int(later.argmax())
    layer, head, position = (int(each) for each in torch.unravel_index(torch.tensor(worst), later.shape))
    by_token = later.mean((0, 1))  # (length,)
    most = by_token.topk(min(MOST, len(by_token))).indices.tolist()
    shares = survival(left)
    ages = [2**power for power in range(len(shares).bit_length()) if 2**power < len(shares)]
    return {
        "evictions": gone,
        "missed_mass": float(later.sum()) / left.shape[0] / left.shape[1] / left.shape[2],
        "missed_per_eviction": float(later.sum()) / gone if gone else None,
        "missed_worst": {"missed": float(later.max()), "layer": layers[layer], "kv_head": head, "position": position},
        "most_missed": [
            {"position": each, "token": tokens[each] if tokens else "", "missed": float(by_token[each])}
            for each in most
        ],
        "survival": {"ages": ages, "held": [float(shares[age]) for age in ages]},
    }


def _of_heads(own: Row, layers: list[int], group: int, values: Mapping[str, Tensor]) -> list[Row]:
    """A row for each layer and query head. values: (layers, heads) each."""
    return [
        {
            **own,
            "layer": layer,
            "kv_head": head // group,
            "head": head,
            **{name: float(each[index, head]) for name, each in values.items()},
        }
        for index, layer in enumerate(layers)
        for head in range(values["retained"].shape[1])
    ]


# -- the table ---------------------------------------------------------------------------------------------------------


def _cells(row: Row) -> list[str]:
    lowest, worst = row.get("lowest_head"), row.get("missed_worst")
    return [
        row["policy"],
        "" if row["budget"] is None else str(row["budget"]),
        *(cell for name in ("retained", "recall") for cell in (_number(row[name]), _versus(row, name))),
        *(_number(row.get(name)) for name in ("missed_per_eviction", "policy_headroom")),
        _number(row.get("budget_headroom") if row["policy"] == ORACLE else None),
        "" if lowest is None else f"{lowest['retained']:.2f} (layer {lowest['layer']}, head {lowest['head']})",
        "" if not worst or not row["evictions"] else f"{worst['missed']:.2f} (position {worst['position']})",
    ]


def _versus(row: Row, measure: str) -> str:
    """The difference from the best policy with its interval, or "tie" before it."""
    if row["kind"] != "policy" or row[f"{measure}_is_best"]:
        return "best" if row["kind"] == "policy" else ""
    difference, low, high = (row[f"{measure}_vs_best{end}"] for end in ("", "_low", "_high"))
    interval = f" [{low:+.4f}, {high:+.4f}]" if math.isfinite(low) else ""
    return f"{'tie ' * row[f'{measure}_tie_with_best']}{difference:+.4f}{interval}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
