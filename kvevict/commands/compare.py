"""``kvevict compare``: every policy on one model, text and budget."""

from __future__ import annotations

import argparse
import sys

from kvevict.commands.options import (
    Commands,
    add_model,
    add_output,
    add_text,
    budget,
    names,
    need,
    parser_of,
    positive,
    say,
)

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
    add("--tokens", type=positive, default=TOKENS, help="how many tokens of the text to read")
    add("--chunk", type=positive, default=32, help="tokens per forward; 1 is token by token, and slow")
    add("--policies", type=names, help="names separated by commas; all of them if left out")
    add("--seed", type=int, default=0, help="of the policies that draw random numbers")
    add_output(compare, "kvevict-results")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the files."""
    need("compare", "matplotlib", "tqdm")
    # imported here: the other commands need none of it
    import torch
    from tqdm import tqdm

    from kvevict.compare import FULL_CACHE, SPEED_NOTE, choose, compare
    from kvevict.models import check_device, check_installed, load_model
    from kvevict.results import check_folder
    from kvevict.text import load_text

    # whatever can be wrong with the command is found before anything slow
    chosen, _ = choose(options.policies, options.budget, seed=options.seed)
    check_folder(options.output)
    check_installed(options.model)
    if options.device:
        check_device(options.device)
    text = load_text(options.text)
    if text.notice:
        say(text.notice)
    loaded = load_model(options.model, device=options.device, dtype=options.dtype, notify=say)
    ids = torch.tensor(loaded.tokenizer(text.text, verbose=False)["input_ids"][: options.tokens])
    if len(ids) < options.tokens:
        say(f"{text.name} has only {len(ids)} tokens")
    say(f"{loaded.description}; {text.name}, {len(ids)} tokens; budget {options.budget}")

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
