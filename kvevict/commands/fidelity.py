"""``kvevict fidelity``: how close each cache stays to the full cache."""

from __future__ import annotations

import argparse

from kvevict.commands.options import (
    Commands,
    add_caches,
    add_documents,
    add_model,
    add_output,
    add_protocol,
    count,
    parser_of,
    positive,
    protocol_of,
    shared_of,
    source_of,
)


def add(commands: Commands) -> None:
    """Declares the command."""
    fidelity = parser_of(
        commands,
        "fidelity",
        "measure how close caches stay to the full cache",
        "Read texts through the full cache and through policies side by side: mean KL divergence of next-token "
        "distributions, top-1 agreement, and how many tokens of greedy decoding are the same.",
    )
    fidelity.set_defaults(run=run)
    add_model(fidelity)
    add_documents(fidelity, 1024)
    add_caches(fidelity)
    add_protocol(fidelity)
    fidelity.add_argument(
        "--prompts", type=count, default=4, help="prompts of each document to decode from, at most; 0 for none"
    )
    fidelity.add_argument("--prompt", type=positive, default=256, help="tokens of each prompt")
    fidelity.add_argument("--new", type=positive, default=64, help="tokens decoded after each prompt")
    add_output(fidelity, "kvevict-results/fidelity")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the files."""
    from kvevict.commands.running import run_and_print
    from kvevict.plan import make_plan

    plan = make_plan(
        {
            **shared_of(options),
            "measure": "fidelity",
            "texts": [source_of(options)],
            "protocols": [protocol_of(options)],
            "generation": {"prompts": options.prompts, "prompt": options.prompt, "new": options.new},
        }
    )
    run_and_print("fidelity", plan, options.output)
