"""Decode steps of a forward that ``torch.compile`` compiled, beside the same steps uncompiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from kvevict.bench.caches import Entrant, entrants, fill, twin_of
from kvevict.bench.rows import Measured
from kvevict.bench.timing import Progress, check_counts, time_steps
from kvevict.errors import OptionError
from kvevict.policies.base import Policy


def compiled_steps(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    held: int,
    *,
    steps: int,
    baselines: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of one token with ``held`` tokens in every cache: each policy, and StaticCache if it is a baseline, twice.

    What is compiled is compiled in the warm-up; caches of one kind share it.
    """
    check_counts(steps, held)
    static = [each for each in baselines if each == "static"]
    plain = entrants(model, policies, tokens=held, budget=held, baselines=static)
    twin = compiled_twin(model)
    whole = entrants(twin, policies, tokens=held, budget=held, baselines=static)
    group = plain + [Entrant(f"{each.name}, compiled", each.model, each.make, each.fill) for each in whole[1:]]
    caches: dict[str, Cache] = {}
    with torch.compiler.set_stance("force_eager"):  # compiling for the sizes of a prompt would take minutes
        for each in group:
            fill(each.model, caches.setdefault(each.name, each.make()), each.fill)
    return time_steps(group, "compiled", held, steps=steps, caches=caches, progress=progress)


def compiled_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with a compiled forward. The model itself stays as it is."""
    twin = twin_of(model)
    cast(Any, twin).forward = torch.compile(twin.forward)
    return twin


def check_compiler(device: torch.device) -> None:
    """Raises OptionError if ``torch.compile`` cannot compile here."""
    try:
        torch.compile(nn.Softplus())(torch.zeros(2, device=device))
    except Exception as error:  # whatever a backend raises
        raise OptionError(
            f"section 'compiled': torch.compile does not work here ({str(error).splitlines()[0]}): install what it "
            "needs (on a CPU, a C++ compiler), or leave the section out"
        ) from error
