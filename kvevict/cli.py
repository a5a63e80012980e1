"""The command ``kvevict``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

import kvevict
from kvevict.commands import COMMANDS
from kvevict.errors import KvevictError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 2 for an error the user can act on, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except KvevictError as error:
        print(f"kvevict: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvevict: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvevict", description="Compare KV cache eviction policies.")
    parser.add_argument("--version", action="version", version=f"kvevict {kvevict.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    for name in COMMANDS:
        importlib.import_module(f"kvevict.commands.{name}").add(commands)
    return parser
