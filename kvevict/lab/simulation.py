"""Many policies and budgets on one trace, in lockstep: the measurement, and the table of it."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvevict.errors import OptionError
from kvevict.lab.bounds import Ceiling, Clairvoyant
from kvevict.lab.catalogue import CATALOGUE, PUBLISHED_RECALL, PUBLISHED_RETAINED
from kvevict.lab.harness import HEAVY, Lane, Log, prepared, reads_keys
from kvevict.lab.history import History, Watch
from kvevict.lab.traces import CATALOGUE_SOURCE, PUBLISHED_SEED, Trace
from kvevict.policies import POLICIES, Random, make_policy
from kvevict.policies.base import Policy
from kvevict.results import environment, save_files

BUDGETS = ((256, 512, 1024), (64, 128))
"""What is simulated if nothing else is asked for: the catalogue's budgets, and smaller ones for short traces."""

ORACLE, RANDOM, CEILING = "oracle", "random", "ceiling"

MEASURES = (
    f"Retained: share of a query's attention that is on held tokens, mean over queries. Recall: share of each query's "
    f"{HEAVY} most attended tokens that are held, over all queries. Both before the policy acts on the query."
)
BOUNDS_NOTE = (
    f"{CEILING} is the most that any set of tokens could retain, chosen anew for every query, so no policy with equal "
    f"layer budgets can pass it. {ORACLE} knows the whole trace and evicts the token with the least attention to come. "
    f"{RANDOM} keeps a random subset."
)


@dataclass(frozen=True)
class Row:
    """One policy at one budget.

    policy:   the policy with its options.
    retained, recall: means over runs, layers and query heads.
    by_run:   (retained, recall) of each run.
    by_layer: (retained, recall) of each layer, means over runs and query heads.
    by_head, recall_by_head: retained and recall of each layer and query head, means over runs.
    perplexity: from inside the model that a trace was captured from, if it was measured.
    """

    name: str
    policy: str
    budget: int
    retained: float
    recall: float
    by_run: list[tuple[float, float]]
    by_layer: list[tuple[float, float]]
    by_head: list[list[float]]
    recall_by_head: list[list[float]]
    perplexity: float | None = None

    @property
    def retained_spread(self) -> float | None:
        """Sample standard deviation over runs; None for one run."""
        return _spread([run[0] for run in self.by_run])

    @property
    def recall_spread(self) -> float | None:
        """Sample standard deviation over runs; None for one run."""
        return _spread([run[1] for run in self.by_run])


@dataclass(frozen=True)
class Simulation:
    """A finished simulation.

    rows:     policy by policy, each at all budgets.
    left_out: policies that cannot run here, and why.
    logs:     by (name, budget): what happened to the KV head that was asked for, else empty.
    history:  when every token left and what it would still have received, if it was asked for.
    """

    settings: dict[str, Any]
    rows: list[Row]
    left_out: dict[str, str]
    notes: list[str]
    logs: dict[tuple[str, int], Log]
    history: History | None = None

    @property
    def names(self) -> list[str]:
        """The policies, in order."""
        return list(dict.fromkeys(row.name for row in self.rows))

    def row(self, name: str, budget: int) -> Row:
        """One row; KeyError if there is none."""
        return {(row.name, row.budget): row for row in self.rows}[name, budget]

    def cells(self) -> list[list[str]]:
        """The table: a header, then a line for each policy."""
        budgets = self.settings["budgets"]
        header = ["policy", *(f"retained@{b}" for b in budgets), *(f"recall@{b}" for b in budgets)]
        measured = any(row.perplexity is not None for row in self.rows)
        if measured:
            header += [f"perplexity@{b}" for b in budgets]
        lines = [header]
        for name in self.names:
            rows = [self.row(name, budget) for budget in budgets]
            retained = [_number(row.retained, row.retained_spread) for row in rows]
            recall = [_number(row.recall, row.recall_spread) for row in rows]
            perplexity = ["–" if row.perplexity is None else f"{row.perplexity:.2f}" for row in rows]
            lines.append([name, *retained, *recall, *(perplexity if measured else [])])
        return lines

    def table(self) -> str:
        """The rows as aligned text."""
        cells = self.cells()
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    def markdown(self) -> str:
        """The settings and the rows as Markdown."""
        header, *lines = self.cells()
        text = [f"# Policies on {self.settings['trace']}", ""]
        text += [f"- {name.replace('_', ' ')}: {value}" for name, value in self.settings.items()]
        text += ["", "| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
        text += ["| " + " | ".join(line) + " |" for line in lines]
        text += ["", *self.notes, *(f"Left out: `{name}` ({reason})." for name, reason in self.left_out.items())]
        return "\n".join(text) + "\n"

    def json(self) -> str:
        """Everything but the logs as JSON, with all digits."""
        rows = [
            dataclasses.asdict(row) | {"retained_spread": row.retained_spread, "recall_spread": row.recall_spread}
            for row in self.rows
        ]
        document = {"settings": self.settings, "rows": rows, "left_out": self.left_out, "notes": self.notes}
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def save(self, folder: Path) -> list[Path]:
        """Writes simulation.json and simulation.md, each whole or not at all; returns their paths.

        Raises OutputError.
        """
        return save_files(folder, {"simulation.json": self.json().encode(), "simulation.md": self.markdown().encode()})


def simulate(
    trace: Trace,
    policies: Mapping[str, Policy] | Sequence[str | Policy] | None = None,
    budgets: Sequence[int] | None = None,
    *,
    lenient: bool = False,
    bounds: bool = True,
    log: tuple[int, int] | None = None,
    renormalize: bool = False,
    history: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """Steps policies over ``trace`` under every budget, token by token.

    policies: names or instances; a mapping names them itself. None is the catalogue's on its own trace, and every
        registered one on others, of which those that cannot run are left out. Asked for, they raise OptionError.
    budgets:  tokens per KV head; None is ``default_budgets``.
    lenient:  leaves out what cannot run, also of the policies asked for.
    bounds:   adds the rows "ceiling", "oracle" and "random"; see ``kvevict.lab.bounds``.
    log:      (layer, KV head) whose evictions to write down step by step, of the first run.
    renormalize: shows policies rows that sum to one over the held tokens, as inside a model; see ``Lane``.
    history:  keeps when every token left; see ``kvevict.lab.history``.
    progress: called with the number of steps done since its last call, all policies counted.

    >>> from kvevict.lab.traces import decode_trace
    >>> result = simulate(decode_trace(300), ["streaming_llm"], [64], bounds=False)
    >>> round(result.row("streaming_llm", 64).retained, 4)
    0.831
    """
    budgets = check_budgets(budgets, trace)
    if log is not None:
        check_log(log, trace)
    chosen, left_out = choose(trace, policies, budgets, lenient=lenient)
    if bounds:
        for name in (ORACLE, CEILING):
            if name in chosen:
                raise OptionError(f"a policy is called {name!r}, as a bound is: rename it, or leave the bounds out")
        chosen |= {ORACLE: Clairvoyant.of(trace), RANDOM: chosen.get(RANDOM, Random())}
    lanes = {
        # the oracle reckons with the trace's own numbers
        name: Lane(policy, trace, budgets, log=log, renormalize=renormalize and name != ORACLE, history=history)
        for name, policy in chosen.items()
    }
    ceiling = Ceiling(trace, budgets) if bounds else None
    watch = Watch(trace, lanes) if history else None
    possible = torch.zeros((), dtype=torch.int64)
    for block in trace.blocks():
        weights, heavy = prepared(block, trace)
        first = block.start + (1 if trace.own else 0)
        possible += torch.arange(first, first + weights.shape[3]).clamp_max(HEAVY).sum()
        if ceiling is not None:
            ceiling.run(block, weights, heavy)
        for lane in lanes.values():
            lane.run(block, weights, heavy)
            if progress is not None:
                progress(weights.shape[3])
        if watch is not None:
            watch.run(block)
    rows = [row for name, lane in lanes.items() for row in _rows(name, repr(lane.policy), lane, int(possible))]
    if ceiling is not None:
        rows += _rows(CEILING, "the best tokens of each query, evicted ones included", ceiling, int(possible))
    settings = {
        "trace": trace.name,
        **trace.about,
        "budgets": list(budgets),
        "renormalize": renormalize,
        **environment(),
    }
    notes = [MEASURES, *([BOUNDS_NOTE] if bounds else [])]
    logs = {(name, b): each for name, lane in lanes.items() for b, each in zip(budgets, lane.logs, strict=False)}
    result = Simulation(settings, rows, left_out, notes, logs, None if watch is None else watch.history(int(possible)))
    published = _published(result, chosen)
    if published:
        result.notes.append(published)
    return result


def choose(
    trace: Trace,
    policies: Mapping[str, Policy] | Sequence[str | Policy] | None,
    budgets: Sequence[int],
    *,
    lenient: bool = False,
) -> tuple[dict[str, Policy], dict[str, str]]:
    """The policies to run by name, and those left out with the reason; see ``simulate``."""
    if policies is None:
        lenient = True
        policies = CATALOGUE if trace.about.get("source") == CATALOGUE_SOURCE else list(POLICIES)
    if not policies:
        raise OptionError("no policy to simulate: name at least one")
    named = dict(policies) if isinstance(policies, Mapping) else dict(map(_named, policies))
    chosen: dict[str, Policy] = {}
    left_out: dict[str, str] = {}
    for name, policy in named.items():
        reason = _reason_against(name, make_policy(policy), trace, budgets)
        if reason and not lenient:
            raise OptionError(f"{reason}: leave {name} out")
        if reason:
            left_out[name] = reason
        else:
            chosen[name] = policy
    return chosen, left_out


def default_budgets(trace: Trace) -> tuple[int, ...]:
    """The first of BUDGETS that the trace outgrows, as far as it does; half of a very short trace."""
    fitting = (tuple(budget for budget in budgets if budget < trace.length) for budgets in BUDGETS)
    return next(filter(None, fitting), (max(1, trace.length // 2),))


def check_budgets(budgets: Sequence[int] | None, trace: Trace) -> list[int]:
    """The budgets, None for the default ones, or OptionError."""
    if budgets is None:
        return list(default_budgets(trace))
    if not budgets or len(set(budgets)) < len(budgets):
        raise OptionError(f"budgets={list(budgets)}: give at least one, and each once")
    for budget in budgets:
        if type(budget) is not int or budget < 1:
            raise OptionError(f"budget={budget!r}: give a number of tokens per KV head, 1 or more")
        if budget > trace.length:
            raise OptionError(
                f"budget={budget} is above the {trace.length} tokens of {trace.name}, so nothing would be evicted: "
                f"give at most {trace.length}"
            )
    return list(budgets)


def check_log(at: tuple[int, int], trace: Trace) -> None:
    """Raises OptionError for a layer and KV head that the trace has not."""
    if not (0 <= at[0] < trace.layers and 0 <= at[1] < trace.heads):
        raise OptionError(
            f"layer {at[0]}, KV head {at[1]}: {trace.name} has layers 0 to {trace.layers - 1} and KV heads 0 to "
            f"{trace.heads - 1}"
        )


def _named(given: str | Policy) -> tuple[str, Policy]:
    policy = make_policy(given)
    if isinstance(given, str):
        return given, policy
    changed = [
        f"{option.name}={getattr(policy, option.name)!r}"
        for option in dataclasses.fields(policy)
        if option.repr and getattr(policy, option.name) != option.default
    ]
    name = policy.name or type(policy).__name__
    return f"{name}({', '.join(changed)})" if changed else name, policy


def _reason_against(name: str, policy: Policy, trace: Trace, budgets: Sequence[int]) -> str | None:
    """Why the policy cannot run on the trace, or None."""
    least = policy.least()
    if policy.evicts and least > min(budgets):
        return f"a budget of {min(budgets)} cannot hold the {least} tokens that {name} protects"
    if not trace.has_keys and reads_keys(policy):
        return f"{name} reads keys or values, and {trace.name} has attention weights only"
    return None


def _rows(name: str, policy: str, lane: Lane | Ceiling, possible: int) -> list[Row]:
    trace, budgets = lane.trace, lane.budgets
    shape = (trace.layers, trace.runs, len(budgets), trace.heads * trace.group)
    retained: Tensor = lane.retained.view(shape) / trace.steps
    recall: Tensor = lane.hits.view(shape).double() / possible
    rows = []
    for at, budget in enumerate(budgets):
        mine, hits = retained[:, :, at], recall[:, :, at]  # (layers, runs, heads)
        rows.append(
            Row(
                name=name,
                policy=policy,
                budget=budget,
                retained=float(mine.mean()),
                recall=float(hits.mean()),
                by_run=list(zip(mine.mean((0, 2)).tolist(), hits.mean((0, 2)).tolist(), strict=True)),
                by_layer=list(zip(mine.mean((1, 2)).tolist(), hits.mean((1, 2)).tolist(), strict=True)),
                by_head=mine.mean(1).tolist(),
                recall_by_head=hits.mean(1).tolist(),
            )
        )
    return rows


def _spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _number(mean: float, spread: float | None) -> str:
    return f"{mean:.4f}" if spread is None else f"{mean:.4f} ± {spread:.4f}"


def _published(result: Simulation, policies: Mapping[str, Policy]) -> str | None:
    """How far the catalogue's policies are from its published figures, on its own trace and seed."""
    settings = result.settings
    if settings["trace"] != "decode-4096" or settings.get("seeds") != [PUBLISHED_SEED]:
        return None
    differences = [
        abs(getattr(result.row(name, budget), measure) - figure)
        for measure, table in (("retained", PUBLISHED_RETAINED), ("recall", PUBLISHED_RECALL))
        for (name, budget), figure in table.items()
        if budget in settings["budgets"] and policies.get(name) == CATALOGUE.get(name, policies.get(ORACLE))
    ]
    if not differences:
        return None
    return (
        f"Published figures of the policybook catalogue: {len(differences)} compared, largest difference "
        f"{max(differences):.6f}; they have four decimals, so 0.000050 is rounding."
    )
