"""``kvevict sweep``: everything that a YAML file asks for, resumed where it was stopped."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from kvevict.commands.options import Commands, add_model, add_text, need, parser_of, positive


def add(commands: Commands) -> None:
    """Declares the command."""
    sweep = parser_of(
        commands,
        "sweep",
        "measure everything that a YAML file asks for",
        "Measure models × texts × policies × budgets × seeds × protections. Run again, it goes on where it was "
        "stopped; run by `accelerate launch`, it is shared out over processes.",
    )
    sweep.set_defaults(run=run)
    sweep.add_argument("config", type=Path, help="a YAML file such as those in configs/")
    add_model(sweep, default=None)
    add_text(sweep)
    sweep.add_argument("--tokens", type=positive, help="how many tokens of each document to read")
    sweep.add_argument("--limit", type=positive, help="how many documents of each text to read")
    sweep.add_argument("--output", type=Path, help="folder for the results; left out, kvevict-results/NAME of the file")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the tables and writes the files. Options replace what the file says."""
    need("sweep", "yaml")
    from kvevict.commands.running import run_and_print
    from kvevict.plan import load_plan

    plan = load_plan(options.config)
    if options.model is not None:
        plan = dataclasses.replace(plan, models=(options.model,))
    for name in ("device", "dtype"):
        if getattr(options, name) is not None:
            plan = dataclasses.replace(plan, **{name: getattr(options, name)})
    texts = plan.texts
    if options.text is not None:
        texts = (dataclasses.replace(texts[0], source=options.text),)
    for name in ("tokens", "limit"):
        if getattr(options, name) is not None:
            texts = tuple(dataclasses.replace(text, **{name: getattr(options, name)}) for text in texts)
    plan = dataclasses.replace(plan, texts=tuple(dict.fromkeys(texts)))
    run_and_print("sweep", plan, options.output or Path("kvevict-results") / options.config.stem)
