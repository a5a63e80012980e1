"""``kvevict growth``: seconds per step and bytes held, token by token, while text is generated."""

from __future__ import annotations

import argparse

from kvevict.commands.options import (
    Commands,
    add_caches,
    add_model,
    add_output,
    add_text,
    parser_of,
    positive,
    say,
    several,
    shared_of,
)
from kvevict.commands.progress import progress_bar
from kvevict.commands.reading import read_text
from kvevict.errors import OptionError

POLICIES = ["streaming_llm", "tova", "h2o", "snapkv"]


def add(commands: Commands) -> None:
    """Declares the command."""
    growth = parser_of(
        commands,
        "growth",
        "record memory and speed while tokens are generated",
        "Generate greedily after a prompt with the full cache and with policies, taking turns in one process, and "
        "write down seconds and bytes at every step. Run it on a machine that does nothing else.",
    )
    growth.set_defaults(run=run)
    add_model(growth)
    add_text(growth)
    growth.add_argument("--prompt", type=several, default=32, help="tokens of the text to begin with")
    growth.add_argument("--new", type=positive, default=512, help="tokens to generate")
    add_caches(growth, POLICIES)
    add_output(growth, "kvevict-results/growth")


def run(options: argparse.Namespace) -> None:
    """Generates, prints the table and writes the files."""
    # imported here: other commands need none of it
    import torch

    from kvevict.growth import growth, growth_rows, growth_table
    from kvevict.models import revision
    from kvevict.plan import FULL_CACHE, make_plan
    from kvevict.results import RESULTS, aligned_table, check_folder, environment, json_line, markdown_table, save_files

    cells, _ = make_plan(shared_of(options)).cells()
    check_folder(options.output)
    loaded, text, ids = read_text(options, options.text, options.prompt)
    if len(ids) < options.prompt:
        raise OptionError(f"{text.name} has only {len(ids)} tokens: give a shorter --prompt, or a longer text")
    named = {FULL_CACHE: cells[0]} | {f"{cell.name} at {cell.budget}": cell for cell in cells[1:]}
    caches = {name: (cell.policy, cell.budget) for name, cell in named.items() if cell.policy and cell.budget}
    say(f"{loaded.description}; a prompt of {len(ids)} tokens of {text.name}, {options.new} new ones")
    with progress_bar((options.new + 1) * (len(caches) + 1), "steps") as progress:
        found = growth(loaded.model, torch.tensor(ids), caches, options.new, progress=progress)
    key = {
        "model": options.model,
        "revision": revision(options.model, loaded.model),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
        "text": text.name,
        "text_sha256": text.sha256,
        "protocol": f"greedy generation after a prompt of {len(ids)} tokens, caches taking turns",
        **environment(),
    }
    about = {
        name: {
            "policy": cell.name,
            "options": "transformers.DynamicCache" if cell.policy is None else repr(cell.policy),
            "budget": cell.budget,
            "protection": dict(cell.protection),
            "seed": options.seed,
        }
        for name, cell in named.items()
    }
    rows = growth_rows(found, about, key)
    head, lines = growth_table(rows)
    notes = (
        f"{key['model']} ({key['revision']}, {key['dtype']} on {key['device']}), {options.new} tokens generated after "
        f"{len(ids)} of {text.name}. Milliseconds: median over the last quarter of the steps. Made with kvevict "
        f"{key['kvevict']}, torch {key['torch']}, transformers {key['transformers']}, {key['threads']} threads."
    )
    contents = {
        "results.md": f"# Growth\n\n{markdown_table(head, lines)}\n{notes}\n".encode(),
        RESULTS: "".join(map(json_line, rows)).encode(),
    }
    files = save_files(options.output, contents)
    print(aligned_table(head, lines), notes, f"Written: {', '.join(map(str, files))}", sep="\n\n")
    print(f"Next: kvevict plot {options.output}")
