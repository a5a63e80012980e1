"""``kvevict plot``: pictures of finished results."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvevict.commands.options import Commands, names, need, parser_of
from kvevict.errors import OptionError, OutputError

FORMATS = ("png", "svg")


def add(commands: Commands) -> None:
    """Declares the command."""
    plot = parser_of(
        commands,
        "plot",
        "draw the results of a finished command",
        "Draw everything that a folder of results gives: measures against the budget, loss by position, needle maps; "
        "what is kept by head, age, token and step, and policies beside the oracle; memory and speed. Or what a "
        "bench.json gives: time and memory of each section.",
    )
    plot.set_defaults(run=run)
    plot.add_argument("results", type=Path, help="the folder that another command wrote, or a bench.json")
    plot.add_argument("--format", type=names, default="png", help="png, svg, or both separated by a comma")
    plot.add_argument("--output", type=Path, help="folder for the pictures; left out, figures/ in the results")


def run(options: argparse.Namespace) -> None:
    """Draws and writes each picture."""
    need("plot", "matplotlib")
    from kvevict.figures import figures_of
    from kvevict.plots import picture
    from kvevict.results import save_files

    if not options.format:
        raise OptionError(f"--format '': give {' or '.join(FORMATS)}, or leave it out")
    for kind in options.format:
        if kind not in FORMATS:
            raise OptionError(f"format {kind!r}: there are {' and '.join(FORMATS)}")
    results: Path = options.results
    folder = options.output or (results.parent if results.is_file() else results) / "figures"
    drawn = 0
    for name, figure in figures_of(results):
        for path in save_files(folder, {f"{name}.{kind}": picture(figure, kind) for kind in options.format}):
            print(path)
            drawn += 1
    if not drawn:
        raise OutputError(
            f"{str(results)!r} has nothing to draw: these pictures compare policies, and it holds the full cache alone"
        )
