"""The command ``kvevict``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import kvevict
from kvevict.errors import KvevictError, MissingPackageError
from kvevict.policies import POLICIES

TOKENS = 1024
"""Enough for every policy to evict most of the text at the default budget, in minutes on two cores."""


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

    policies = commands.add_parser("policies", help="list the policies")
    policies.set_defaults(run=_policies)

    compare = commands.add_parser(
        "compare",
        help="measure every policy on a model and a text",
        description="Read one text through every policy at one budget, and compare perplexity, memory and speed with "
        "the full cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    compare.set_defaults(run=_compare)
    add = compare.add_argument
    add("--model", default="smollm2", help='"smollm2", "gemma3", a local folder, or a Hugging Face Hub id')
    add(
        "--text",
        help='a text file, or "datasets:ID[:CONFIG[:SPLIT]]"; left out, it is WikiText-2, or Python\'s documentation '
        "where that cannot be loaded",
    )
    add("--budget", type=_budget, default=128, help="tokens per KV head and layer, or a share of them such as 0.25")
    add("--tokens", type=_positive, default=TOKENS, help="how many tokens of the text to read")
    add("--chunk", type=_positive, default=32, help="tokens per forward; 1 is token by token, and slow")
    add("--policies", type=_names, help="names separated by commas; all of them if left out")
    add("--device", help='such as "cpu" or "cuda:0"; "auto" spreads the model; left out, CUDA if there is one')
    add("--dtype", choices=("float32", "bfloat16", "float16", "auto"), help="of the weights")
    add("--seed", type=int, default=0, help="of the policies that draw random numbers")
    add("--output", type=Path, default=Path("kvevict-results"), help="folder for the table and the chart")
    return parser


def _policies(options: argparse.Namespace) -> None:
    width = max(map(len, POLICIES))
    for name, policy in POLICIES.items():
        first = (policy.__doc__ or "").strip().splitlines() or [""]
        print(f"{name:{width}}  {first[0]}")


def _compare(options: argparse.Namespace) -> None:
    for package in ("matplotlib", "tqdm"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"compare needs the package {package}. Run: pip install {package}")
    # imported here: the other commands need none of it
    import torch
    from tqdm import tqdm

    from kvevict.compare import FULL_CACHE, SPEED_NOTE, check_folder, choose, compare
    from kvevict.models import check_device, check_installed, load_model
    from kvevict.text import load_text

    # whatever can be wrong with the command is found before anything slow
    chosen, _ = choose(options.policies, options.budget, seed=options.seed)
    check_folder(options.output)
    check_installed(options.model)
    if options.device:
        check_device(options.device)
    text = load_text(options.text)
    if text.notice:
        _say(text.notice)
    loaded = load_model(options.model, device=options.device, dtype=options.dtype, notify=_say)
    ids = torch.tensor(loaded.tokenizer(text.text, verbose=False)["input_ids"][: options.tokens])
    if len(ids) < options.tokens:
        _say(f"{text.name} has only {len(ids)} tokens")
    _say(f"{loaded.description}; {text.name}, {len(ids)} tokens; budget {options.budget}")

    forwarded = max(len(ids) - 1, 0)
    with tqdm(
        total=forwarded * (len(chosen) + 1),
        unit=" tokens",
        smoothing=0,  # policies differ in speed, so the mean so far foretells best
        mininterval=0.2 if sys.stderr.isatty() else 15,
        dynamic_ncols=True,
    ) as bar:

        def progress(name: str, tokens: int) -> None:
            bar.set_description(f"{name:{len(FULL_CACHE)}}", refresh=False)
            bar.update(tokens)

        comparison = compare(
            loaded.model,
            ids,
            budget=options.budget,
            policies=options.policies,
            chunk=options.chunk,
            seed=options.seed,
            settings={
                "model": loaded.description,
                "text": text.name,
                "text_sha256": text.sha256,
                **({"text_notice": text.notice} if text.notice else {}),
            },
            progress=progress,
        )
    files = comparison.save(options.output)
    print(comparison.table())
    print()
    for name, reason in comparison.left_out.items():
        print(f"{name} was left out: {reason}")
    if text.notice:
        print(f"Text: {text.notice}.")
    print(SPEED_NOTE)
    print("Written:", ", ".join(map(str, files)))


def _say(line: str) -> None:
    print(f"kvevict: {line}", file=sys.stderr, flush=True)


def _budget(given: str) -> int | float:
    try:
        return int(given)
    except ValueError:
        return float(given)


def _positive(given: str) -> int:
    number = int(given)
    if number < 1:
        raise ValueError
    return number


def _names(given: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))


_budget.__name__, _positive.__name__ = "budget", "number of tokens"  # argparse: "invalid budget value: 'x'"
