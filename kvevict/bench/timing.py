"""Times of decode steps and of prompts: every cache in turn, in another order each round, after a warm-up."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvevict.bench.caches import Entrant, entrants, fill, forward, held_tokens, random_ids, rewind
from kvevict.bench.rows import Measured
from kvevict.errors import OptionError
from kvevict.evaluation import cache_bytes
from kvevict.policies.base import Policy

WARM_UP = 3
"""Steps that are not counted: the first ones cut a prompt and allocate."""

Progress = Callable[[float], None]
"""Told which share of the measurement was done since it was last called."""

Name = TypeVar("Name")


def decode(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    held: int,
    *,
    steps: int,
    rows: int = 1,
    baselines: Sequence[str] = (),
    section: str = "decode",
    at: int | None = None,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of one token with ``held`` tokens in every cache; those of the policies evict one at each step."""
    check_counts(steps, held)
    group = entrants(model, policies, tokens=held, budget=held, baselines=baselines)
    return time_steps(group, section, held if at is None else at, steps=steps, rows=rows, progress=progress)


def against_full(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    seen: int,
    budget: int,
    *,
    steps: int,
    baselines: Sequence[str] = (),
    section: str = "after",
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of one token after ``seen`` tokens: a full cache, one that holds ``budget`` tokens, and the policies."""
    check_counts(steps, seen, budget)
    group = entrants(model, policies, tokens=seen, budget=budget, limit=True, baselines=baselines)
    return time_steps(group, section, seen, steps=steps, progress=progress)


def prefill(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    tokens: int,
    budget: int,
    *,
    repeats: int,
    baselines: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Measured]:
    """A prompt of ``tokens`` tokens in one forward."""
    check_counts(repeats, tokens, budget)
    group = prompt_entrants(model, policies, tokens, budget, baselines)
    ids = random_ids(model, 1, tokens)
    seconds: dict[str, list[float]] = {each.name: [] for each in group}
    held, nbytes = {}, {}
    tick = ticking(progress, (repeats + 1) * len(group))
    for repeat in range(repeats + 1):  # the first one warms up
        for each in shuffled(group, repeat):
            cache = each.make()
            elapsed = timed(each.model, cache, ids)
            if repeat:
                seconds[each.name].append(elapsed)
            held[each.name], nbytes[each.name] = held_tokens(cache), cache_bytes(cache)
            del cache
            tick()
    return [Measured("prefill", n, tokens, held[n], tuple(s), nbytes[n]) for n, s in seconds.items()]


def prompt_entrants(
    model: PreTrainedModel, policies: Mapping[str, Policy], tokens: int, budget: int, baselines: Sequence[str]
) -> list[Entrant]:
    """Who reads a whole prompt: writing in place is no other way to do that."""
    others = [each for each in baselines if each != "in-place"]
    return entrants(model, policies, tokens=tokens, budget=budget, baselines=others, fused=True)


def time_steps(
    group: Sequence[Entrant],
    section: str,
    at: int,
    *,
    steps: int,
    rows: int = 1,
    caches: dict[str, Cache] | None = None,
    progress: Progress | None = None,
) -> list[Measured]:
    """Fills each cache, then times steps of one token. ``caches``, by name, are filled further and kept."""
    caches = {} if caches is None else caches
    filling = FILLING * len(group)
    tick = ticking(progress, filling + (steps + WARM_UP) * len(group))
    for each in group:
        cache = caches.setdefault(each.name, each.make())
        fill(each.model, cache, each.fill, rows=rows)
        tick(FILLING)
    seconds: dict[str, list[float]] = {each.name: [] for each in group}
    ids = random_ids(group[0].model, rows, steps + WARM_UP)
    gc.collect()
    gc.disable()
    try:
        for step in range(steps + WARM_UP):
            for each in shuffled(group, step):
                elapsed = timed(each.model, caches[each.name], ids[:, step : step + 1])
                if step >= WARM_UP:
                    seconds[each.name].append(elapsed)
                rewind(caches[each.name])
                tick()
    finally:
        gc.enable()
    return [
        Measured(section, name, at, held_tokens(caches[name]), tuple(times), cache_bytes(caches[name]))
        for name, times in seconds.items()
    ]


FILLING = 10
"""Steps that filling a cache is counted as where progress is told."""


def check_counts(repeats: int, *tokens: int) -> None:
    """Raises OptionError for counts that leave nothing to measure."""
    if repeats < 2 or min(tokens) < 2:
        raise OptionError(f"repeats={repeats}, tokens={tokens}: give at least 2 of each")


def shuffled(names: Sequence[Name], seed: int) -> list[Name]:
    """Another order at every round, so that nobody always follows the same one."""
    return random.Random(seed).sample(list(names), len(names))


def ticking(progress: Progress | None, rounds: int) -> Callable[..., None]:
    """A function to call after each of so many rounds, or after several at once."""

    def tick(done: int = 1) -> None:
        if progress is not None:
            progress(done / rounds)

    return tick


def timed(model: PreTrainedModel, cache: Cache, ids: Tensor) -> float:
    """Seconds of one forward, from an idle accelerator to an idle accelerator."""
    wait(ids.device)
    begin = time.perf_counter()
    forward(model, cache, ids)
    wait(ids.device)
    return time.perf_counter() - begin


def wait(device: torch.device) -> None:
    """Until the accelerator has nothing left to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
