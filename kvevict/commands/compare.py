"""``kvevict compare``: every policy on one model, text and budget."""

from __future__ import annotations

import argparse

from kvevict.commands.options import (
    Commands,
    add_model,
    add_output,
    add_policies,
    add_text,
    add_tokens,
    budget,
    need,
    parser_of,
    positive,
    say,
)
from kvevict.commands.progress import bar
from kvevict.commands.reading import read_text

TOKENS = 1024
"""Enough for every policy to evict most of the text at the default budget, in minutes on two cores."""


def add(commands: Commands) -> None:
    """Declares the command."""
    compare = parser_of(
        commands,
        "compare",
        "measure every policy on a model and a text",
        "Read one text through every policy at one budget, and compare perplexity, memory and speed with the full "
        "cache.",
    )
    compare.set_defaults(run=run)
    add_model(compare)
    add_text(compare)
    add = compare.add_argument
    add("--budget", type=budget, default=128, help="tokens per KV head and layer, or a share of them such as 0.25")
    add_tokens(compare, TOKENS)
    add("--chunk", type=positive, default=32, help="tokens per forward; 1 is token by token, and slow")
    add_policies(compare)
    add("--seed", type=int, default=0, help="of the policies that draw random numbers")
    add_output(compare, "kvevict-results")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the files."""
    need("compare", "matplotlib", "tqdm")
    # imported here: the other commands need none of it
    import torch

    from kvevict.compare import FULL_CACHE, SPEED_NOTE, choose, compare
    from kvevict.results import check_folder

    # whatever can be wrong with the command is found before anything slow
    chosen, _ = choose(options.policies, options.budget, seed=options.seed)
    check_folder(options.output)
    loaded, text, ids = read_text(options, options.text, options.tokens)
    if len(ids) < options.tokens:
        say(f"{text.name} has only {len(ids)} tokens")
    say(f"{loaded.description}; {text.name}, {len(ids)} tokens; budget {options.budget}")

    forwarded = max(len(ids) - 1, 0)
    # policies differ in speed, so the mean so far foretells best
    with bar(total=forwarded * (len(chosen) + 1), unit=" tokens", smoothing=0) as shown:

        def progress(name: str, tokens: int) -> None:
            shown.set_description(f"{name:{len(FULL_CACHE)}}", refresh=False)
            shown.update(tokens)

        comparison = compare(
            loaded.model,
            torch.tensor(ids),
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
