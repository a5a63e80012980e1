"""What the commands share: types of options, packages that must be there, and lines for the user."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING, TypeAlias

from kvevict.errors import MissingPackageError

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:  # argparse does not name the type
    Commands = object


def need(command: str, *packages: str) -> None:
    """Raises MissingPackageError for the first package that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"{command} needs the package {package}. Run: pip install {package}")


def say(line: str) -> None:
    """A line beside the command's output."""
    print(f"kvevict: {line}", file=sys.stderr, flush=True)


def budget(given: str) -> int | float:
    """Tokens, or a share."""
    try:
        return int(given)
    except ValueError:
        return float(given)


def positive(given: str) -> int:
    """A number of tokens, at least 1."""
    number = int(given)
    if number < 1:
        raise ValueError
    return number


def names(given: str) -> list[str]:
    """Names separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))


positive.__name__ = "number of tokens"  # argparse: "invalid number of tokens value: 'x'"
