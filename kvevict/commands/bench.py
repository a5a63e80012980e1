"""``kvevict bench``: decode, prefill and memory beside transformers' own cache, in one process."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from kvevict.commands.options import Commands, names, need, positive, say

POLICIES = ["streaming_llm", "tova", "h2o", "snapkv", "adaptive_ema"]


def add(commands: Commands) -> None:
    """Declares the command."""
    bench = commands.add_parser(
        "bench",
        help="measure speed and memory against transformers' own cache",
        description="Time decode steps and prompts with every cache in turn, in one process, and print medians as "
        "ratios to DynamicCache. Run it on a machine that does nothing else.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    bench.set_defaults(run=run)
    add = bench.add_argument
    add("--model", default="smollm2", help='"smollm2", "gemma3", a local folder, or a Hugging Face Hub id')
    add("--policies", type=names, default=POLICIES, help="names separated by commas")
    add("--held", type=numbers, default=[256, 1024], help="decode: tokens in every cache, separated by commas")
    add("--prefill", type=numbers, default=[1024], help="tokens of the prompts, separated by commas")
    add("--seen", type=numbers, default=[4096], help="decode after this many tokens, against the full cache")
    add("--budget", type=positive, default=512, help="tokens per KV head after a prompt and after --seen")
    add("--steps", type=positive, default=30, help="decode steps of each cache")
    add("--repeats", type=positive, default=3, help="prompts of each cache")
    add("--device", help='such as "cpu" or "cuda:0"; left out, CUDA if there is one')
    add("--dtype", choices=("float32", "bfloat16", "float16", "auto"), help="of the weights")
    add("--output", type=Path, default=Path("kvevict-results"), help="folder for bench.json")


def numbers(given: str) -> list[int]:
    """Numbers of tokens separated by commas; none at all leaves the section out."""
    return [positive(each) for each in given.split(",") if each.strip()]


numbers.__name__ = "numbers of tokens"


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the file."""
    need("bench", "tqdm")
    # imported here: the other commands need none of it
    from tqdm import tqdm

    from kvevict import bench
    from kvevict.models import check_device, check_installed, load_model
    from kvevict.policies import make_policy
    from kvevict.results import check_folder, environment, save_files

    policies = {name: make_policy(name) for name in options.policies}
    check_folder(options.output)
    check_installed(options.model)
    if options.device:
        check_device(options.device)
    loaded = load_model(options.model, device=options.device, dtype=options.dtype, notify=say)
    model = loaded.model.eval()
    caches = len(policies) + 1
    rounds = (options.steps + bench.WARM_UP) * (caches * len(options.held) + (caches + 1) * len(options.seen))
    rounds += (options.repeats + 1) * caches * len(options.prefill)
    rows: list[bench.Measured] = []
    with tqdm(total=rounds, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 15) as bar:
        for held in options.held:
            rows += bench.decode(model, policies, held, steps=options.steps, progress=bar.update)
        for seen in options.seen:
            rows += bench.against_full(model, policies, seen, options.budget, steps=options.steps, progress=bar.update)
        for tokens in options.prefill:
            rows += bench.prefill(model, policies, tokens, options.budget, repeats=options.repeats, progress=bar.update)
    settings = {
        "model": loaded.description,
        "device": str(model.device),
        "budget": options.budget,
        **environment(),
    }
    document = {"settings": settings, "rows": [dataclasses.asdict(row) for row in rows]}
    [path] = save_files(options.output, {"bench.json": (json.dumps(document, indent=1) + "\n").encode()})
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print(bench.table(rows))
    print("Written:", path)
