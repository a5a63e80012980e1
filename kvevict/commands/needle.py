"""``kvevict needle``: which cache still finds a fact hidden in a long text."""

from __future__ import annotations

import argparse

from kvevict.commands.options import (
    Commands,
    add_caches,
    add_model,
    add_output,
    counts,
    names,
    numbers,
    parser_of,
    positive,
    shared_of,
)


def add(commands: Commands) -> None:
    """Declares the command."""
    needle = parser_of(
        commands,
        "needle",
        "measure which caches still find a fact hidden in a text",
        "Hide facts in a text by RULER's rules, compress, and ask: the share of right answers, and how likely the "
        "right answer is between a text without the fact (0) and the full cache (1).",
    )
    needle.set_defaults(run=run)
    add_model(needle)
    add = needle.add_argument
    add("--text", default="noise", help='the haystack: "noise", a text file, or "datasets:ID[:CONFIG[:SPLIT]]"')
    add("--tasks", type=names, default="single", help="of single, multikey, multivalue, passkey, fact")
    add("--kinds", type=names, help="what values are: numbers, words, uuids [numbers]")
    add("--lengths", type=counts, default="512", help="tokens of a prompt, question and answer included")
    add("--depths", type=numbers, default="0,0.25,0.5,0.75,1", help="where the needle is, 0 for the start")
    add("--samples", type=positive, default=1, help="cases for each task, kind, length and depth")
    add(
        "--question",
        choices=("after", "with"),
        default="after",
        help="asked after the context was compressed, or with it",
    )
    add("--chunk", type=positive, help="tokens per forward of the prompt; left out, it is fed whole")
    add_caches(needle)
    add_output(needle, "kvevict-results/needle")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the files."""
    from kvevict.commands.running import run_and_print
    from kvevict.plan import make_plan

    given = ("tasks", "kinds", "lengths", "depths", "samples", "question", "chunk")
    plan = make_plan(
        {
            **shared_of(options),
            "measure": "needle",
            "texts": [options.text],
            "needle": {name: getattr(options, name) for name in given},
        }
    )
    run_and_print("needle", plan, options.output)
