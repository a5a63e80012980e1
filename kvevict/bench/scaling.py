"""How a decode step's time scales: with the tokens seen, the budget, the rows of a batch, and the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from transformers import Cache, PreTrainedModel

from kvevict import host
from kvevict.bench.caches import entrants
from kvevict.bench.rows import Measured
from kvevict.bench.shapes import Shape, random_model
from kvevict.bench.timing import Progress, check_counts, decode, time_steps
from kvevict.cache import EvictingCache
from kvevict.policies.base import Policy


def by_seen(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    budget: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step after so many tokens: evicting caches read on from size to size, full ones hold everything."""
    check_counts(steps, budget, *sizes)
    caches: dict[str, Cache] = {}

    def measure(seen: int, part: Progress | None) -> list[Measured]:
        group = entrants(model, policies, tokens=seen, budget=budget, limit=True)
        found = time_steps(group, "seen", seen, steps=steps, caches=caches, progress=part)
        for name, cache in list(caches.items()):
            if not isinstance(cache, EvictingCache):
                del caches[name]
        return found

    return _each(sizes, measure, progress)


def by_budget(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step at a full cache of so many tokens, against DynamicCache holding as many."""

    def measure(size: int, part: Progress | None) -> list[Measured]:
        return decode(model, policies, size, steps=steps, section="budget", progress=part)

    return _each(sizes, measure, progress)


def by_batch(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    held: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of so many rows with ``held`` tokens in each."""

    def measure(rows: int, part: Progress | None) -> list[Measured]:
        return decode(model, policies, held, steps=steps, rows=rows, section="batch", at=rows, progress=part)

    return _each(sizes, measure, progress)


def by_layers(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    held: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of random-weight Llamas of the model's widths and so many layers, with ``held`` tokens."""

    def measure(layers: int, part: Progress | None) -> list[Measured]:
        deep = random_model(shape_of(model, layers), device=str(model.device), dtype=model.dtype)
        return decode(deep, policies, held, steps=steps, section="layers", at=layers, progress=part)

    return _each(sizes, measure, progress)


def shape_of(model: PreTrainedModel, layers: int) -> Shape:
    """The model's widths with another number of layers."""
    config = host.decoder_config(model)
    heads = int(config.num_attention_heads)
    return Shape(
        layers=layers,
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        vocabulary=int(config.vocab_size),
    )


def _each(
    sizes: Sequence[int], measure: Callable[[int, Progress | None], list[Measured]], progress: Progress | None
) -> list[Measured]:
    """What ``measure`` finds at each size, the smallest first."""
    found: list[Measured] = []
    for size in sorted(set(sizes)):
        found += measure(size, None if progress is None else _share(progress, size, sizes))
    return found


def _share(progress: Progress, size: int, sizes: Sequence[int]) -> Progress:
    """Progress of one size among several: each is taken to last as long as it is large, and a little longer."""
    rest = max(sizes) / 4
    weight = (size + rest) / sum(each + rest for each in set(sizes))
    return lambda done: progress(done * weight)
