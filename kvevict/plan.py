"""What a sweep measures, read from YAML: every mistake in it is found before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvevict.checks import check_budget
from kvevict.errors import OptionError
from kvevict.needles import CHOOSABLE, KINDS, QUESTIONS, TASKS
from kvevict.policies import POLICIES, make_policy
from kvevict.policies.base import Policy
from kvevict.protocols import Protocol, chunked, make_protocol
from kvevict.text import DOCUMENTS

MEASURES = ("perplexity", "fidelity", "needle")
FULL_CACHE = "full cache"
"""The name of the rows of transformers' own cache, which forgets nothing."""
MOST_THREADS = 1024
"""Threads beyond any machine's cores; with many times as many the process dies."""


@dataclass(frozen=True)
class Source:
    """A text to read.

    source:    as ``kvevict.text.load_text`` takes it.
    documents: "whole", "articles" or "rows": what is read with a fresh cache each.
    tokens:    the most tokens of each document; None for all.
    limit:     the most documents; None for all.
    """

    source: str | None = None
    documents: str = "whole"
    tokens: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Generation:
    """How fidelity's greedy decoding is measured: ``prompts`` pieces of each document, evenly spaced.

    prompt: tokens of each prompt; new: tokens decoded after it. ``prompts=0`` leaves it out.
    """

    prompts: int = 4
    prompt: int = 256
    new: int = 64


@dataclass(frozen=True)
class Needles:
    """Which needles are hidden where; see ``kvevict.needles``.

    samples: cases for each task, kind, length and depth. chunk: tokens per forward of the context; None feeds it whole.
    """

    tasks: tuple[str, ...] = ("single",)
    kinds: tuple[str, ...] = ("numbers",)
    lengths: tuple[int, ...] = (512,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 1
    question: str = "after"
    chunk: int | None = None


@dataclass(frozen=True)
class Choice:
    """A policy by name with the options that were asked for."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


@dataclass(frozen=True)
class Cell:
    """One cache to measure: a policy at a budget, or the full cache where ``policy`` is None."""

    name: str
    policy: Policy | None
    budget: int | float | None
    protection: Mapping[str, Any]
    seed: int
    protocol: Protocol | None


@dataclass(frozen=True)
class Plan:
    """Everything a sweep measures: models × texts × protocols × (full cache, policies × budgets × protections × seeds).

    policies:    None for all that a budget can hold.
    protections: options that all policies get, such as {"sinks": 4, "recent": 32}; {} leaves each at its own.
    seeds:       for policies that draw random numbers, and for needles; other measures use the first alone.
    threads:     of torch on the CPU; the last digits of results may depend on it. None leaves it.
    """

    measure: str = "perplexity"
    models: tuple[str, ...] = ("smollm2",)
    texts: tuple[Source, ...] = (Source(),)
    policies: tuple[Choice, ...] | None = None
    budgets: tuple[int | float, ...] = (128,)
    protections: tuple[Mapping[str, Any], ...] = ({},)
    seeds: tuple[int, ...] = (0,)
    protocols: tuple[Protocol, ...] = (chunked(32),)
    generation: Generation = Generation()
    needle: Needles = Needles()
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None

    def cells(self) -> tuple[list[Cell], dict[str, str]]:
        """What to measure for each model and text, the full cache first; and what is left out, with the reason.

        Left out is what a budget cannot hold when all policies were asked for; asked for by name it is an error.
        Raises OptionError.
        """
        cells: dict[Any, Cell] = {}
        left_out: dict[str, str] = {}
        choices = self.policies if self.policies is not None else [Choice(name) for name in POLICIES]
        protocols: Sequence[Protocol | None] = [None] if self.measure == "needle" else self.protocols
        seeds = self.seeds if self.measure == "needle" else self.seeds[:1]
        for protocol in protocols:
            if choices and protocol is not None and not protocol.evicts:
                raise OptionError(
                    f"{protocol} feeds each window in one forward, so no policy can evict before its predictions: "
                    'give chunk, or no policies (policies: [], or --policies "") for the full cache alone'
                )
            for seed in seeds:
                cells[FULL_CACHE, protocol, seed] = Cell(FULL_CACHE, None, None, {}, seed, protocol)
            for budget in self.budgets:
                for protection in self.protections:
                    for choice in choices:
                        for seed in self.seeds:
                            policy = _policy(choice, protection, seed)
                            reason = _too_small(choice, policy, budget)
                            if reason and self.policies is not None:
                                raise OptionError(reason)
                            if reason:
                                left_out[f"{choice} at {budget}"] = reason
                                continue
                            cell = Cell(str(choice), policy, budget, protection, seed, protocol)
                            where = seed if self.measure == "needle" else None  # a cell does not repeat for its seed
                            cells.setdefault((repr(policy), budget, str(protection), protocol, where), cell)
        return list(cells.values()), left_out


def load_plan(path: Path) -> Plan:
    """Reads a YAML file. Raises OptionError naming the file, the key, and what was expected."""
    import yaml

    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(f"config {str(path)!r} cannot be read: {reason}") from error
    try:
        return make_plan(yaml.load(content, _loader()))
    except yaml.YAMLError as error:
        raise OptionError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from error
    except OptionError as error:
        raise OptionError(f"{path.name}: {error}") from error


def make_plan(given: Any) -> Plan:
    """A plan from plain lists, mappings and values, as YAML gives them. Raises OptionError.

    >>> make_plan({"policies": ["tova", {"name": "h2o", "recent": 8}], "budgets": 64}).policies
    (Choice(name='tova', options={}), Choice(name='h2o', options={'recent': 8}))
    """
    values = dict(_mapping(given, "the file", Plan))
    readers: dict[str, Callable[[Any, str], Any]] = {
        "measure": lambda value, where: _one_of(value, where, MEASURES),
        "models": _each(_text),
        "texts": _each(_source),
        "policies": _policies,
        "budgets": _each(_budget),
        "protections": _each(_protection),
        "seeds": _each(_whole),
        "protocols": _each(_protocol),
        "generation": _generation,
        "needle": _needles,
        "device": _text,
        "dtype": _text,
        "threads": _threads,
    }
    plan = Plan(**{key: readers[key](value, key) for key, value in values.items() if value is not None})
    plan.cells()  # budgets and options that cannot go together
    return plan


def _policy(choice: Choice, protection: Mapping[str, Any], seed: int) -> Policy:
    for option in protection:
        if option in choice.options:
            raise OptionError(
                f"policy {choice} sets {option!r} itself, and a protection does too: leave out one of them"
            )
    options = {**choice.options, **protection}
    seeded = any(option.name == "seed" for option in dataclasses.fields(POLICIES[choice.name]))
    if seeded and "seed" not in options:
        options["seed"] = seed
    return make_policy(choice.name, **options)


def _too_small(choice: Choice, policy: Policy, budget: int | float) -> str:
    least = policy.least()
    if not policy.evicts or not isinstance(budget, int) or least <= budget:
        return ""
    return f"budget {budget} cannot hold the {least} tokens that {choice} protects: raise it to at least {least}"


# -- readers of YAML values: each says where the value stands and what was expected --------------------------------


def _mapping(value: Any, where: str, kind: type) -> Mapping[str, Any]:
    accepted = [option.name for option in dataclasses.fields(kind)]
    if not isinstance(value, Mapping):
        raise OptionError(f"{where}: expected a mapping of {', '.join(accepted)}, got {value!r}")
    for key in value:
        if key not in accepted:
            close = get_close_matches(str(key), accepted, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise OptionError(f"{where}: unknown key {key!r}{hint}; there are: {', '.join(accepted)}")
    return value


def _each(read: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    """Reads a list, or a single value as a list of one; repeated values once."""

    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise OptionError(f"{where}: the list is empty: give at least one, or leave {where} out")
        found: list[Any] = []
        for number, each in enumerate(values):
            one = read(each, f"{where}[{number}]" if isinstance(value, list) else where)
            if one not in found:
                found.append(one)
        return tuple(found)

    return read_all


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{where}: expected a name, got {value!r}")
    return value


def _one_of(value: Any, where: str, accepted: Sequence[str]) -> str:
    if value not in accepted:
        close = get_close_matches(str(value), accepted, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise OptionError(f"{where}: {value!r} is none of {', '.join(accepted)}{hint}")
    return str(value)


def _whole(value: Any, where: str) -> int:
    if type(value) is not int:
        raise OptionError(f"{where}: expected a whole number, got {value!r}")
    return value


def _count(value: Any, where: str, least: int = 1) -> int:
    if _whole(value, where) < least:
        raise OptionError(f"{where}: expected at least {least}, got {value}")
    return int(value)


def _threads(value: Any, where: str) -> int:
    if _count(value, where) > MOST_THREADS:
        raise OptionError(f"{where}: expected at most {MOST_THREADS}, got {value}: give the number of cores")
    return int(value)


def _budget(value: Any, where: str) -> int | float:
    try:
        return check_budget(value)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error


def _source(value: Any, where: str) -> Source:
    if value is None or isinstance(value, str):
        return Source(value)
    given = _mapping(value, where, Source)
    return Source(
        source=None if given.get("source") is None else _text(given["source"], f"{where}.source"),
        documents=_one_of(given.get("documents", "whole"), f"{where}.documents", DOCUMENTS),
        tokens=None if given.get("tokens") is None else _count(given["tokens"], f"{where}.tokens", 2),
        limit=None if given.get("limit") is None else _count(given["limit"], f"{where}.limit"),
    )


def _policies(value: Any, where: str) -> tuple[Choice, ...] | None:
    if value == "all":
        return None
    return () if value == [] else _each(_choice)(value, where)


def _choice(value: Any, where: str) -> Choice:
    given = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise OptionError(f"{where}: expected a policy's name, or a mapping with its name and options, got {value!r}")
    options = {str(key): option for key, option in given.items() if key != "name"}
    try:
        make_policy(given["name"], **options)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error
    return Choice(given["name"], options)


def _protection(value: Any, where: str) -> Mapping[str, Any]:
    return dict(_mapping(value, where, Policy))


def _protocol(value: Any, where: str) -> Protocol:
    given = {"name": value} if isinstance(value, str) else value
    options = dict(_mapping(given, where, Protocol))
    try:
        return make_protocol(options.pop("name", "chunked"), **options)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error


def _generation(value: Any, where: str) -> Generation:
    given = _mapping(value, where, Generation)
    return Generation(**{key: _count(each, f"{where}.{key}", key != "prompts") for key, each in given.items()})


def _needles(value: Any, where: str) -> Needles:
    given = _mapping(value, where, Needles)
    readers: dict[str, Callable[[Any, str], Any]] = {
        "tasks": _each(lambda each, place: _one_of(each, place, TASKS)),
        "kinds": _each(lambda each, place: _one_of(each, place, KINDS)),
        "lengths": _each(lambda each, place: _count(each, place, 32)),
        "depths": _each(_depth),
        "samples": _count,
        "question": lambda each, place: _one_of(each, place, QUESTIONS),
        "chunk": _count,
    }
    chosen = Needles(**{key: readers[key](each, f"{where}.{key}") for key, each in given.items() if each is not None})
    if given.get("kinds") is not None and not set(chosen.tasks) & set(CHOOSABLE):
        raise OptionError(
            f"{where}.kinds: values of {', '.join(chosen.tasks)} are of their own kind. Leave it out, or give one of "
            f"the tasks {', '.join(CHOOSABLE)}"
        )
    return chosen


def _depth(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise OptionError(f"{where}: expected a depth from 0 (the start) to 1 (the end), got {value!r}")
    return float(value)


def _loader() -> Any:
    """PyYAML's safe loader, which would take the last of two equal keys without a word."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is not annotated
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            before: list[Any] = []
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in before:
                    raise yaml.YAMLError(f"the key {key!r} is there twice (line {key_node.start_mark.line + 1})")
                before.append(key)
            return super().construct_mapping(node, deep)

    return Loader
