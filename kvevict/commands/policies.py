"""``kvevict policies``: what there is."""

from __future__ import annotations

import argparse

from kvevict.commands.options import Commands
from kvevict.policies import POLICIES


def add(commands: Commands) -> None:
    """Declares the command."""
    commands.add_parser("policies", help="list the policies").set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints each policy's name and what it keeps."""
    width = max(map(len, POLICIES))
    for name, policy in POLICIES.items():
        first = (policy.__doc__ or "").strip().splitlines() or [""]
        print(f"{name:{width}}  {first[0]}")
