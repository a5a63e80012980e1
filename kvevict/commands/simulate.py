"""``kvevict simulate``: every policy on one trace of attention, in lockstep."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvevict.commands.options import Commands, names, parser_of, positive, say
from kvevict.commands.progress import progress_bar

if TYPE_CHECKING:
    from kvevict.lab.simulation import Simulation
    from kvevict.lab.traces import Trace
    from kvevict.policies.base import Policy

CHUNK = 32


def numbers(given: str) -> list[int]:
    """Whole numbers separated by commas; "1-5" is a range."""
    found: list[int] = []
    for part in names(given):
        first, dash, last = part.partition("-")
        if dash and int(last) < int(first):
            raise ValueError
        found += range(int(first), int(last) + 1) if dash else [int(part)]
    return found


numbers.__name__ = "list of whole numbers"  # argparse: "invalid list of whole numbers value: 'x'"


def add(commands: Commands) -> None:
    """Declares the command."""
    simulate = parser_of(
        commands,
        "simulate",
        "step policies over a trace of attention",
        "Step policies over one trace of attention at several budgets, with the bounds of what any policy could do, "
        "and compare retained attention mass and heavy-hitter recall. No model runs.",
    )
    simulate.set_defaults(run=run)
    add = simulate.add_argument
    add("trace", help='"decode-4096" (or any decode-N), a pattern such as "mixed", or a folder of kvevict capture')
    add(
        "--budgets",
        type=numbers,
        help="tokens per KV head, separated by commas; left out, 256,512,1024, or 64,128 for short traces",
    )
    add(
        "--policies",
        type=names,
        help='names separated by commas; "catalogue" for the policybook catalogue\'s options (the default for decode '
        'traces), "catalogue:NAME" for one of them, "all" for every policy at its defaults (the default for others)',
    )
    add("--policy", action="append", default=[], metavar="FILE:NAME", help="a policy of yours; may be repeated")
    add("--seeds", type=numbers, help="of synthetic traces, such as 7 or 1-5; the table then has mean and spread")
    add("--length", type=positive, help="tokens; left out, the trace's own")
    add("--closed-loop", action="store_true", help="of a captured trace: perplexity from inside its model besides")
    add("--chunk", type=positive, help=f"tokens per forward of --closed-loop; left out, {CHUNK}")
    add(
        "--renormalize", action="store_true", help="show policies rows that sum to one over what is held, as in a model"
    )
    add("--no-bounds", action="store_true", help="leave out the rows ceiling, oracle and random")
    add("--html", type=Path, metavar="FILE", help="also write a page that shows every step of one KV head")
    add("--layer", type=int, help="layer of --html; left out, 0")
    add("--head", type=int, help="KV head of --html; left out, 0")
    add("--output", type=Path, default=Path("kvevict-results"), help="folder for the table")


def run(options: argparse.Namespace) -> None:
    """Simulates, prints the table and writes the files."""
    from kvevict.lab.report import report
    from kvevict.lab.simulation import check_budgets, check_log, choose, simulate
    from kvevict.lab.traces import named_trace
    from kvevict.results import check_folder, save_files

    refuse_idle_options(options)
    trace = named_trace(options.trace, length=options.length, seeds=options.seeds)
    budgets = check_budgets(options.budgets, trace)
    policies = chosen_policies(options.policies, options.policy)
    lenient = "all" in (options.policies or [])
    chosen, _ = choose(trace, policies, budgets, lenient=lenient)
    at = (options.layer or 0, options.head or 0)
    check_log(at, trace)
    closed = from_inside(options, trace, chosen) if options.closed_loop else None
    if options.html is not None:
        check_page(options.html)
    check_folder(options.output)
    if "notice" in trace.about:
        say(trace.about["notice"])
    say(f"{trace.name}: {describe(trace)}; {len(chosen)} policies at budgets {', '.join(map(str, budgets))}")
    lanes = len(chosen) + (0 if options.no_bounds else 1 + ("random" not in chosen))
    with progress_bar(lanes * trace.steps, "steps") as progress:
        result = simulate(
            trace,
            policies,
            budgets,
            lenient=lenient,
            bounds=not options.no_bounds,
            renormalize=options.renormalize,
            log=None if options.html is None else at,
            progress=progress,
        )
    result.notes.append(said_of_options(policies, trace))
    if closed is not None:
        result = closed(result)
    files = result.save(options.output)
    if options.html is not None:
        page = report(result, trace, at)
        files += save_files(options.html.parent, {options.html.name: page.encode()})
    print(result.table())
    print()
    for name, reason in result.left_out.items():
        print(f"{name} was left out: {reason}")
    print(*result.notes, sep="\n")
    print("Written:", ", ".join(map(str, files)))


def check_page(path: Path) -> None:
    """Raises OptionError for a page that would be a folder, and OutputError where none can be written."""
    from kvevict.errors import OptionError
    from kvevict.results import check_folder

    if path.is_dir():
        raise OptionError(f"--html {str(path)!r} is a folder: name the file, such as {str(path / 'report.html')!r}")
    check_folder(path.parent)


def refuse_idle_options(options: argparse.Namespace) -> None:
    """Raises OptionError for an option that would change nothing."""
    from kvevict.errors import OptionError

    for option, needs in (("layer", "html"), ("head", "html"), ("chunk", "closed_loop")):
        if getattr(options, option) is not None and not getattr(options, needs):
            needed = needs.replace("_", "-")
            raise OptionError(f"--{option} changes nothing without --{needed}: add it, or leave it out")


def chosen_policies(given: list[str] | None, files: list[str]) -> dict[str, Policy] | None:
    """The policies by the names of their rows, or None for the trace's default."""
    from kvevict.errors import OptionError
    from kvevict.lab.catalogue import CATALOGUE
    from kvevict.lab.userfile import load_policy
    from kvevict.policies import POLICIES, make_policy

    if given is None and not files:
        return None
    chosen: dict[str, Policy] = {}
    alone = given is not None and all(name.startswith("catalogue") for name in given)
    for name in given or []:
        group, _, one = name.partition(":")
        if name == "all":
            chosen |= {each: make_policy(each) for each in POLICIES}
        elif group == "catalogue":
            if one and one not in CATALOGUE:
                raise OptionError(f"the catalogue has no policy {one!r}; it has: {', '.join(CATALOGUE)}")
            for each in [one] if one else CATALOGUE:
                chosen[each if alone else f"catalogue:{each}"] = CATALOGUE[each]
        else:
            chosen[name] = make_policy(name)
    for file in files:
        name, policy = load_policy(file)
        if name in chosen:
            raise OptionError(f"two policies are called {name!r}: give one of them another name")
        chosen[name] = policy
    return chosen


def from_inside(
    options: argparse.Namespace, trace: Trace, policies: dict[str, Policy]
) -> Callable[[Simulation], Simulation]:
    """Loads the model that the trace was captured from; the answer adds its perplexities to a simulation."""
    import torch

    from kvevict.errors import OptionError
    from kvevict.lab.captured import read_header
    from kvevict.lab.closed import beside, closed_loop
    from kvevict.models import check_installed, load_model

    folder = Path(options.trace).expanduser()
    if not folder.is_dir():
        raise OptionError(f"--closed-loop: {trace.name} was made by a formula, and no model has it. Capture one")
    header = read_header(folder)
    if not header.model:
        raise OptionError(f"--closed-loop: {folder} does not say which model to load. Capture it with kvevict capture")
    check_installed(header.model)
    model = load_model(header.model, notify=say).model
    chunk = options.chunk or CHUNK

    def add_perplexities(simulation: Simulation) -> Simulation:
        ids = torch.tensor(header.ids[: trace.length])
        say(f"inside the model, {chunk} tokens per forward")
        budgets = simulation.settings["budgets"]
        with progress_bar(len(policies) * len(budgets) * (trace.length - 1), "tokens") as progress:
            found = closed_loop(model, ids, policies, budgets, chunk=chunk, progress=progress)
        return beside(simulation, found, chunk)

    return add_perplexities


def said_of_options(policies: dict[str, Policy] | None, trace: Trace) -> str:
    """Whose options the rows were run with."""
    from kvevict.lab.catalogue import CATALOGUE
    from kvevict.lab.traces import CATALOGUE_SOURCE

    catalogue = policies is None and trace.about.get("source") == CATALOGUE_SOURCE
    if policies is not None:
        catalogue = all(CATALOGUE.get(name) is policy for name, policy in policies.items())
    if catalogue:
        return "Policies have the options of the policybook catalogue; --policies all runs them at their defaults."
    return "Policies are at their defaults; rows named catalogue:… have the options of the policybook catalogue."


def describe(trace: Trace) -> str:
    """The size of a trace in words."""
    words = [f"{trace.length} tokens"]
    if trace.layers > 1 or trace.heads > 1:
        words.append(f"{trace.layers} layers of {trace.heads * trace.group} heads over {trace.heads} KV heads")
    if trace.runs > 1:
        words.append(f"{trace.runs} seeds")
    return ", ".join(words)
