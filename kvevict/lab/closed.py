"""The proxy's error: retained mass on a captured trace beside perplexity from inside the model it was captured from."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

from torch import Tensor
from transformers import PreTrainedModel

from kvevict.cache import EvictingCache
from kvevict.evaluation import perplexity
from kvevict.lab.simulation import Simulation
from kvevict.policies.base import Policy


def closed_loop(
    model: PreTrainedModel,
    ids: Tensor,
    policies: Mapping[str, Policy],
    budgets: Sequence[int],
    *,
    chunk: int = 32,
    progress: Callable[[int], None] | None = None,
) -> dict[tuple[str, int], float]:
    """Perplexity of ``ids`` (N,) through an evicting cache, ``chunk`` tokens per forward, by (name, budget)."""
    return {
        (name, budget): perplexity(
            model, ids, partial(EvictingCache, model, policy, budget), chunk=chunk, progress=progress
        ).perplexity
        for (name, policy), budget in product(policies.items(), budgets)
    }


def beside(simulation: Simulation, perplexities: Mapping[tuple[str, int], float], chunk: int) -> Simulation:
    """The simulation with perplexities in its rows, and how well retained mass ranks them in its notes.

    Policies that forget nothing are left out of the ranking: they would agree whatever the proxy is worth.
    """
    rows = [dataclasses.replace(row, perplexity=perplexities.get((row.name, row.budget))) for row in simulation.rows]
    ranked = [row for row in rows if row.perplexity is not None and not row.policy.startswith("Full(")]
    budgets = list(dict.fromkeys(row.budget for row in ranked))
    found = {f"budget {b}": [row for row in ranked if row.budget == b] for b in budgets}
    found["all budgets"] = ranked
    values = {
        where: rank_correlation([row.retained for row in some], [-(row.perplexity or 0.0) for row in some])
        for where, some in found.items()
        if where != "all budgets" or len(budgets) > 1
    }
    said = ", ".join(f"{'undefined' if rho is None else f'{rho:.3f}'} ({where})" for where, rho in values.items())
    notes = [
        *simulation.notes,
        f"Perplexity is from inside the model, {chunk} tokens per forward, every token after the first predicted.",
        f"Rank correlation (Spearman) of retained mass and perplexity over {len(found['all budgets'])} rows, 1 if more "
        f"mass always means less perplexity: {said}.",
    ]
    settings = {**simulation.settings, "chunk": chunk, "rank_correlation": values}
    return dataclasses.replace(simulation, rows=rows, notes=notes, settings=settings)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's coefficient, ties by their mean rank; None where one of the two never changes.

    >>> rank_correlation([0.1, 0.2, 0.9], [1.0, 5.0, 7.0])
    1.0
    """
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]
