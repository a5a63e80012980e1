"""``kvevict perplexity``: how well a model predicts texts through each cache."""

from __future__ import annotations

import argparse

from kvevict.commands.options import (
    Commands,
    add_caches,
    add_documents,
    add_model,
    add_output,
    add_protocol,
    parser_of,
    protocol_of,
    shared_of,
    source_of,
)


def add(commands: Commands) -> None:
    """Declares the command."""
    perplexity = parser_of(
        commands,
        "perplexity",
        "measure perplexity by a named protocol, with intervals",
        "Read texts through the full cache and through policies at one or more budgets: token perplexity, word "
        "perplexity, bits per byte, and perplexity after the budget was exceeded, with paired bootstrap intervals.",
    )
    perplexity.set_defaults(run=run)
    add_model(perplexity)
    add_documents(perplexity, 1024)
    add_caches(perplexity)
    add_protocol(perplexity)
    add_output(perplexity, "kvevict-results/perplexity")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the files."""
    from kvevict.commands.running import run_and_print
    from kvevict.plan import make_plan

    plan = make_plan({**shared_of(options), "texts": [source_of(options)], "protocols": [protocol_of(options)]})
    run_and_print("perplexity", plan, options.output)
