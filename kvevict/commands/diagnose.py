"""``kvevict diagnose``: what policies keep of a real model's attention, head by head, between two bounds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvevict.commands.options import (
    Commands,
    add_caches,
    add_model,
    add_output,
    add_text,
    add_tokens,
    counts,
    parser_of,
    say,
)
from kvevict.commands.progress import progress_bar
from kvevict.commands.reading import read_text
from kvevict.errors import OptionError

if TYPE_CHECKING:
    from kvevict.models import Loaded
    from kvevict.policies import Policy


def add(commands: Commands) -> None:
    """Declares the command."""
    diagnose = parser_of(
        commands,
        "diagnose",
        "measure what policies keep of a model's attention, head by head",
        "Record a model's attention on a text, replay policies over it, and give retained attention mass and "
        "heavy-hitter recall of every layer and head, the attention that evicted tokens would still have received, "
        "what is held when, and the bounds of a clairvoyant and a random choice.",
    )
    diagnose.set_defaults(run=run)
    add_model(diagnose)
    add_text(diagnose)
    add_tokens(diagnose, 512)
    add_caches(diagnose)
    diagnose.add_argument(
        "--steps",
        type=counts,
        help="after how many tokens to write down what is held, separated by commas; left out, all",
    )
    diagnose.add_argument(
        "--trace", type=Path, help="folder for the recorded attention, or one of kvevict capture; left out, in OUTPUT"
    )
    add_output(diagnose, "kvevict-results/diagnose")


def run(options: argparse.Namespace) -> None:
    """Records, replays, prints the table and writes the files."""
    # imported here: other commands need none of it
    import dataclasses

    from kvevict.lab.capture import evicting_layers
    from kvevict.lab.captured import captured_trace
    from kvevict.lab.diagnostics import check_steps, diagnose
    from kvevict.lab.simulation import check_budgets, choose
    from kvevict.models import revision
    from kvevict.results import check_folder

    policies, left_out = chosen_policies(options)
    check_folder(options.output)
    loaded, text, ids = read_text(options, options.text, options.tokens)
    if len(ids) <= max(options.budget):
        raise OptionError(
            f"{len(ids)} tokens of {text.name} do not outgrow a budget of {max(options.budget)}: nothing would be "
            "evicted. Give more --tokens, a longer text, or a smaller --budget"
        )
    check_steps(options.steps, len(ids))
    folder = options.trace or options.output / "trace"
    about = {
        "model": options.model,
        "revision": revision(options.model, loaded.model),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
        "text": text.name,
        "text_sha256": text.sha256,
    }
    record(loaded, options.model, ids, folder, about)
    trace = dataclasses.replace(captured_trace(folder), about=about)
    budgets = check_budgets(options.budget, trace)
    chosen, more = choose(trace, policies, budgets, lenient=options.policies is None)
    say(f"{len(chosen)} policies and the oracle at budgets {', '.join(map(str, budgets))}")
    with progress_bar((len(chosen) + 1) * trace.steps, "steps") as progress:
        result = diagnose(
            trace,
            chosen,
            budgets,
            steps=options.steps,
            seed=options.seed,
            protection=options.protect,
            layers=evicting_layers(loaded.model),
            tokens=[str(loaded.tokenizer.decode([token])) for token in ids],
            progress=progress,
        )
    result = dataclasses.replace(result, left_out={**left_out, **more})
    files = result.save(options.output)
    print(result.text())
    print("Written:", ", ".join(map(str, files)))
    print(f"Next: kvevict plot {options.output}")


def chosen_policies(options: argparse.Namespace) -> tuple[dict[str, Policy], dict[str, str]]:
    """The policies by name with their protection and seed, and those left out with the reason. Raises OptionError."""
    from kvevict.lab.simulation import RANDOM
    from kvevict.plan import make_plan
    from kvevict.policies import Random

    if options.policies == []:
        raise OptionError("no policy to diagnose: name at least one, or leave --policies out for all")
    for budget in options.budget:
        if not isinstance(budget, int):
            raise OptionError(f"budget {budget}: a replay takes budgets in tokens, such as 64,128, and no shares")
    given: dict[str, Any] = {"budgets": options.budget, "protections": [options.protect], "seeds": [options.seed]}
    cells, left_out = make_plan({**given, "policies": options.policies or "all"}).cells()
    keeps_all = {"full"} if options.policies is None else set()
    policies = {cell.name: cell.policy for cell in cells if cell.policy is not None and cell.name not in keeps_all}
    control = policies.setdefault(RANDOM, Random(seed=options.seed, **options.protect))
    if control.least() > min(options.budget):
        raise OptionError(
            f"budget {min(options.budget)} cannot hold the {control.least()} tokens of --protect: raise it, or protect "
            "fewer"
        )
    return policies, left_out


def record(loaded: Loaded, name: str, ids: list[int], folder: Path, about: dict[str, str]) -> None:
    """Captures the model's attention to ``folder``, as far as it is not there already."""
    import torch

    from kvevict.cache import human_bytes
    from kvevict.lab.capture import capture, prepare

    known: dict[str, Any] = {"source": name, "about": {**about, "model": loaded.description}}  # as kvevict capture says
    shape = prepare(loaded.model, torch.tensor(ids), folder, **known)
    say(
        f"{loaded.description}; {about['text']}, {len(ids)} tokens; {shape.layers} layers of "
        f"{shape.heads * shape.group} heads: {human_bytes(shape.nbytes)} before compression in {folder}"
    )
    with progress_bar(len(ids), "tokens") as progress:
        capture(loaded.model, torch.tensor(ids), folder, **known, progress=progress)
