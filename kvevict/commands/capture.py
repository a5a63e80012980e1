"""``kvevict capture``: a real model's attention on a text, to simulate policies on."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from kvevict.commands.options import Commands, add_device, add_tokens, parser_of, positive, say
from kvevict.commands.progress import progress_bar
from kvevict.commands.reading import read_text

TOKENS = 2048


def add(commands: Commands) -> None:
    """Declares the command."""
    capture = parser_of(
        commands,
        "capture",
        "record a model's attention on a text, for simulate",
        "Read a text through a model with nothing evicted, and write the attention of every layer, head and query to a "
        "folder that kvevict simulate replays. An interrupted capture can be simulated as far as it went, and the same "
        "command continues it.",
    )
    capture.set_defaults(run=run)
    add = capture.add_argument
    add("model", help='"smollm2", "gemma3", a local folder, or a Hugging Face Hub id')
    add("text", help='a text file, "datasets:ID[:CONFIG[:SPLIT]]", or "default" for what kvevict compare reads')
    add_tokens(capture, TOKENS)
    add("--block", type=positive, default=64, help="queries per forward and per file")
    add_device(capture)
    add("--output", type=Path, help="folder; left out, kvevict-captures/MODEL-TEXT-TOKENS")


def run(options: argparse.Namespace) -> None:
    """Announces the size, captures, and says what was written."""
    # imported here: other commands need none of it
    import torch

    from kvevict.cache import human_bytes
    from kvevict.lab.capture import capture, prepare
    from kvevict.models import revision

    source = None if options.text == "default" else options.text
    loaded, text, read = read_text(options, source, options.tokens)
    ids = torch.tensor(read)
    if len(ids) < options.tokens:
        say(f"{text.name} has only {len(ids)} tokens")
    folder = options.output or Path("kvevict-captures") / _slug(f"{options.model}-{text.name}-{len(ids)}")
    about = {
        "model": loaded.description,
        "revision": revision(options.model, loaded.model),
        "text": text.name,
        "text_sha256": text.sha256,
    }
    known: dict[str, Any] = {"source": options.model, "block": options.block, "about": about}
    shape = prepare(loaded.model, ids, folder, **known)
    say(
        f"{loaded.description}; {text.name}, {len(ids)} tokens; {shape.layers} layers of {shape.heads * shape.group} "
        f"heads: {human_bytes(shape.nbytes)} before compression, in {shape.blocks} files in {folder}"
    )
    with progress_bar(len(ids), "tokens") as progress:
        done = capture(loaded.model, ids, folder, **known, progress=progress)
    if done.resumed:
        print(f"{done.resumed} tokens were there already.")
    print(
        f"Written: {folder}, {human_bytes(done.stored_bytes)}. Row sums differ from the model's by at most "
        f"{done.row_error:.1e}."
    )
    print(f"Next: kvevict simulate {folder}")


def _slug(name: str) -> str:
    """A name that can be a folder's."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")
