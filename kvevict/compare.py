"""Every policy at one budget on one text, against the full cache: the table, the chart, and the files of both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvevict.cache import EvictingCache, human_bytes
from kvevict.checks import check_budget
from kvevict.errors import OptionError
from kvevict.evaluation import Result, perplexity
from kvevict.policies import POLICIES, make_policy
from kvevict.policies.base import Policy
from kvevict.protocols import chunked
from kvevict.results import aligned_table, environment, finite, markdown_table, save_files

FULL_CACHE = "full cache"
"""The name of the row that the others are measured against: transformers' own cache, which forgets nothing."""

COLUMNS = ("policy", "perplexity", "vs full", "bytes held", "peak", "tokens/s", "speed")

SPEED_NOTE = (
    "Speed is relative to the full cache. Tokens per second are from one run each on a machine that may do other "
    "things: read them as rough ratios. Bytes are what the cache really holds, preallocated room included."
)


@dataclass(frozen=True)
class Row:
    """What one cache cost and gave.

    change: perplexity relative to the full cache's, 0.1 for 10 % more.
    speed:  tokens per second as a ratio to the full cache's.
    """

    name: str
    policy: str
    perplexity: float
    change: float
    held_bytes: int
    peak_bytes: int
    seconds: float
    tokens_per_second: float
    speed: float


@dataclass(frozen=True)
class Comparison:
    """A finished comparison.

    settings: everything needed to repeat it.
    rows:     the full cache first, then the policies in the order asked for.
    left_out: policies that cannot work with this budget, and why.
    """

    settings: dict[str, Any]
    rows: list[Row]
    left_out: dict[str, str]

    def table(self) -> str:
        """The rows as aligned text."""
        return aligned_table(list(COLUMNS), [_cells(row) for row in self.rows])

    def markdown(self) -> str:
        """The settings and the rows as Markdown."""
        lines = [f"# Policies at budget {self.settings['budget']}", ""]
        lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in self.settings.items()]
        lines += ["", markdown_table(list(COLUMNS), [_cells(row) for row in self.rows]).rstrip("\n")]
        lines += ["", *(f"Left out: `{name}` ({reason})." for name, reason in self.left_out.items())]
        return "\n".join([*lines, SPEED_NOTE]) + "\n"

    def json(self) -> str:
        """Everything as JSON; a number that is not finite is null."""
        document = {
            "settings": self.settings,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "left_out": self.left_out,
        }
        return json.dumps(finite(document), indent=2, allow_nan=False) + "\n"

    def chart(self) -> bytes:
        """The bar chart of the perplexities, a PNG. Needs matplotlib."""
        from kvevict.plots import bars, picture

        full, *others = self.rows
        model, tokens, budget = (self.settings[name] for name in ("model", "tokens", "budget"))
        title = f"{model}\n{tokens} tokens, budget {budget}"
        return picture(bars({row.name: row.perplexity for row in others}, full.perplexity, title))

    def save(self, folder: Path) -> list[Path]:
        """Writes results.json, results.md and comparison.png, each whole or not at all; returns their paths.

        Raises OutputError.
        """
        contents = {
            "results.json": self.json().encode(),
            "results.md": self.markdown().encode(),
            "comparison.png": self.chart(),
        }
        return save_files(folder, contents)


def choose(
    policies: Sequence[str | Policy] | None, budget: int | float, *, seed: int = 0
) -> tuple[dict[str, Policy], dict[str, str]]:
    """The policies to compare by name, and those left out with the reason.

    policies: None for every registered one, of which those that protect more tokens than ``budget`` are left out;
        asked for by name, they raise OptionError. ``seed`` goes to those that have one.
    """
    check_budget(budget)
    if policies is not None and not policies:
        raise OptionError("no policy to compare: name at least one")
    chosen: dict[str, Policy] = {}
    left_out: dict[str, str] = {}
    for given in list(POLICIES) if policies is None else policies:
        policy = make_policy(given)
        if isinstance(given, str) and any(option.name == "seed" for option in dataclasses.fields(policy)):
            policy = make_policy(given, seed=seed)
        name = given if isinstance(given, str) else with_options(policy)
        if policy.evicts and isinstance(budget, int) and policy.least() > budget:
            reason = f"budget={budget} cannot hold the {policy.least()} tokens that {name} protects"
            if policies is not None:
                raise OptionError(f"{reason}: raise budget to at least {policy.least()}, or leave {name} out")
            left_out[name] = reason
        else:
            chosen[name] = policy
    return chosen, left_out


def compare(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    budget: int | float,
    policies: Sequence[str | Policy] | None = None,
    chunk: int = 32,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Reads ``ids`` (N,) through transformers' full cache and through every policy, ``chunk`` tokens per forward.

    policies: names or instances; None for all registered ones that the budget can hold.
    settings: anything else worth keeping with the results, such as the names of the model and the text.
    progress: called with the row's name and the number of tokens read since its last call.

    Every policy is tried on the model before the first is measured, so an error comes early.
    """
    chosen, left_out = choose(policies, budget, seed=seed)
    for name, policy in list(chosen.items()):
        try:
            with EvictingCache(model, policy, budget):
                pass
        except OptionError as error:
            if policies is not None:
                raise
            left_out[name] = str(error)
            del chosen[name]
    report = progress or (lambda name, tokens: None)
    # the first forwards of a process are slow, and should not count against the full cache
    perplexity(model, ids.flatten()[: chunk + 1], partial(DynamicCache, config=model.config), chunk=chunk)
    full = perplexity(
        model, ids, partial(DynamicCache, config=model.config), chunk=chunk, progress=partial(report, FULL_CACHE)
    )
    rows = [_row(FULL_CACHE, "transformers.DynamicCache", full, full)]
    for name, policy in chosen.items():
        result = perplexity(
            model, ids, partial(EvictingCache, model, policy, budget), chunk=chunk, progress=partial(report, name)
        )
        rows.append(_row(name, repr(policy), result, full))
    used = {
        **({"model": type(model).__name__} | (settings or {})),
        "tokens": ids.numel(),
        "budget": budget,
        "protocol": f"{chunked(chunk)}: one cache, every token after the first is predicted",
        "seed": seed,
        **environment(),
    }
    return Comparison(used, rows, left_out)


def _row(name: str, policy: str, result: Result, full: Result) -> Row:
    return Row(
        name=name,
        policy=policy,
        perplexity=result.perplexity,
        change=result.perplexity / full.perplexity - 1,
        held_bytes=result.held_bytes,
        peak_bytes=result.peak_bytes,
        seconds=result.seconds,
        tokens_per_second=result.tokens_per_second,
        speed=result.tokens_per_second / full.tokens_per_second,
    )


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        f"{row.perplexity:.2f}",
        f"{row.change:+.1%}",
        human_bytes(row.held_bytes),
        human_bytes(row.peak_bytes),
        f"{row.tokens_per_second:.1f}",
        f"{row.speed:.2f}x",
    ]


def with_options(policy: Policy) -> str:
    """The policy's name and the options that are not at their default: "h2o(recent=8)"."""
    changed = [
        f"{option.name}={getattr(policy, option.name)!r}"
        for option in dataclasses.fields(policy)
        if getattr(policy, option.name) != option.default
    ]
    name = policy.name or type(policy).__name__
    return f"{name}({', '.join(changed)})" if changed else name
