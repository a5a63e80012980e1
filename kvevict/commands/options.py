"""What the commands share: options and their types, packages that must be there, and lines for the user."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvevict.errors import MissingPackageError

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:  # argparse does not name the type
    Commands = object


def parser_of(commands: Commands, name: str, line: str, description: str) -> argparse.ArgumentParser:
    """A new command; its help shows defaults."""
    return commands.add_parser(
        name, help=line, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )


def add_model(parser: argparse.ArgumentParser, default: str | None = "smollm2") -> None:
    """--model, --device and --dtype."""
    parser.add_argument(
        "--model", default=default, help='"smollm2", "gemma3", a local folder, or a Hugging Face Hub id'
    )
    add_device(parser, spread='; "auto" spreads the model')


def add_device(parser: argparse.ArgumentParser, spread: str = "") -> None:
    """--device and --dtype. ``spread``: what to say of a model on several devices."""
    parser.add_argument("--device", help=f'such as "cpu" or "cuda:0"{spread}; left out, CUDA if there is one')
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "auto"), help="of the weights")


def add_text(parser: argparse.ArgumentParser) -> None:
    """--text."""
    parser.add_argument(
        "--text",
        help='a text file; "rows:FILE", whose lines are joined by blank ones as WikiText\'s are; or '
        '"datasets:ID[:CONFIG[:SPLIT]]"; left out, it is WikiText-2, or Python\'s documentation where that cannot be '
        "loaded",
    )


def add_tokens(parser: argparse.ArgumentParser, default: int) -> None:
    """--tokens, of one text."""
    parser.add_argument("--tokens", type=several, default=default, help="how many tokens of the text to read")


def add_documents(parser: argparse.ArgumentParser, tokens: int | None) -> None:
    """--text, --documents, --limit and --tokens."""
    add_text(parser)
    parser.add_argument(
        "--documents",
        choices=("whole", "articles", "rows"),
        default="whole",
        help="what has a fresh cache: the whole text, each WikiText article, or each row of a dataset",
    )
    parser.add_argument("--limit", type=positive, help="how many documents to read; left out, all")
    parser.add_argument("--tokens", type=positive, default=tokens, help="how many tokens of each document to read")


def add_policies(parser: argparse.ArgumentParser, default: list[str] | None = None) -> None:
    """--policies; None is all."""
    left_out = "; all of them if left out" if default is None else ""
    parser.add_argument("--policies", type=names, default=default, help=f"names separated by commas{left_out}")


def add_caches(parser: argparse.ArgumentParser, policies: list[str] | None = None) -> None:
    """--policies, --budget, --protect and --seed, for commands that take several budgets.

    policies: those that are measured if none are named; None is all.
    """
    add_policies(parser, policies)
    parser.add_argument(
        "--budget",
        type=budgets,
        default="128",
        help="tokens per KV head and layer, or shares of them such as 0.25, separated by commas",
    )
    parser.add_argument(
        "--protect",
        type=protection,
        default={},
        help='what all policies keep, such as "sinks=4,recent=32"; left out, each protects what it does by itself',
    )
    parser.add_argument("--seed", type=int, default=0, help="of whatever draws random numbers")


def add_output(parser: argparse.ArgumentParser, folder: str) -> None:
    """--output."""
    parser.add_argument("--output", type=Path, default=Path(folder), help="folder for the results")


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """--protocol, --chunk, --window and --stride."""
    parser.add_argument(
        "--protocol",
        choices=("streaming", "chunked", "windows", "blocks"),
        default="chunked",
        help="one token per forward; --chunk tokens per forward; strided windows; or blocks without overlap",
    )
    parser.add_argument(
        "--chunk", type=positive, help="tokens per forward: 32 if left out, and with windows and blocks a whole one"
    )
    parser.add_argument("--window", type=positive, help="tokens of a window or block")
    parser.add_argument("--stride", type=positive, help="tokens from one window's start to the next")


def protocol_of(options: argparse.Namespace) -> dict[str, Any]:
    """The protocol, as a plan takes it."""
    given = {name: getattr(options, name) for name in ("chunk", "window", "stride")}
    return {"name": options.protocol, **{name: value for name, value in given.items() if value is not None}}


def source_of(options: argparse.Namespace) -> dict[str, Any]:
    """What ``add_documents`` took, as a plan takes it."""
    return {"source": options.text, **{name: getattr(options, name) for name in ("documents", "tokens", "limit")}}


def shared_of(options: argparse.Namespace) -> dict[str, Any]:
    """What ``add_model`` and ``add_caches`` took, as a plan takes it."""
    return {
        "models": [options.model],
        "policies": "all" if options.policies is None else options.policies,
        "budgets": options.budget,
        "protections": [options.protect],
        "seeds": [options.seed],
        "device": options.device,
        "dtype": options.dtype,
    }


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


def budgets(given: str) -> list[int | float]:
    """Budgets separated by commas."""
    return [budget(each) for each in names(given)]


def positive(given: str) -> int:
    """A number of tokens, at least 1."""
    number = int(given)
    if number < 1:
        raise ValueError
    return number


def several(given: str) -> int:
    """A number of tokens of which some can be predicted, at least 2."""
    number = int(given)
    if number < 2:
        raise ValueError
    return number


def count(given: str) -> int:
    """A number, 0 or more."""
    number = int(given)
    if number < 0:
        raise ValueError
    return number


def names(given: str) -> list[str]:
    """Names separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))


def numbers(given: str) -> list[float]:
    """Numbers separated by commas."""
    return [float(each) for each in names(given)]


def counts(given: str) -> list[int]:
    """Numbers of tokens separated by commas."""
    return [positive(each) for each in names(given)]


def protection(given: str) -> dict[str, Any]:
    """Options of every policy, each once: "sinks=4,recent=32"."""
    found: dict[str, Any] = {}
    for each in names(given):
        name, value = (part.strip() for part in each.split("=", 1))
        if name in found:
            raise ValueError
        found[name] = value if value == "whole" else budget(value)
    return found


# what argparse says: "invalid number of tokens value: 'x'"
positive.__name__ = "number of tokens"
several.__name__ = "number of 2 or more tokens"
counts.__name__ = "list of numbers of tokens"
numbers.__name__ = "list of numbers"
protection.__name__ = "list of options, each once,"
