"""Runs a plan for a command: the progress bar with the time left, the tables, and where the files are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvevict.commands.options import need, say
from kvevict.commands.progress import bar

if TYPE_CHECKING:
    from kvevict.plan import Plan
    from kvevict.sweep import Progress


def run_and_print(command: str, plan: Plan, folder: Path) -> None:
    """Measures, prints the tables and writes the files."""
    need(command, "tqdm", "yaml")
    # imported here: the other commands need none of it
    from kvevict.models import check_device, check_installed
    from kvevict.results import check_folder
    from kvevict.sweep import leaving_processes, run_plan

    # whatever can be wrong with the command is found before anything slow
    check_folder(folder)
    for model in plan.models:
        check_installed(model)
    if plan.device is not None:
        check_device(plan.device)
    if "WORLD_SIZE" not in os.environ and "MASTER_ADDR" in os.environ and "ACCELERATE_USE_CPU" in os.environ:
        say("accelerate started one process: for several on CPUs it needs --multi_gpu, and device cpu")
    first = os.environ.get("RANK", "0") == "0"  # of the processes of a launcher, one speaks for all
    # policies differ in speed, so the mean so far foretells best
    with leaving_processes(), bar(disable=not first, unit=" tokens", smoothing=0) as shown:

        def progress(step: Progress) -> None:
            shown.total = max(shown.n + step.tokens, step.total)
            shown.set_description(step.name, refresh=False)
            shown.update(step.tokens)

        try:
            report = run_plan(plan, folder, notify=say if first else None, progress=progress)
        except KeyboardInterrupt:
            say(f"what is finished is in {folder}: the same command goes on from there")
            raise
    if report is None:  # another process prints
        return
    print(report.text())
    print("Written:", ", ".join(str(folder / name) for name in report.files()))
