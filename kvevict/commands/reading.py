"""The model and the text that a command was given."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvevict.commands.options import say

if TYPE_CHECKING:
    from kvevict.models import Loaded
    from kvevict.text import Text


def read_text(options: argparse.Namespace, source: str | None, tokens: int) -> tuple[Loaded, Text, list[int]]:
    """The model that the options name, the text, and as many of its first tokens as it has of ``tokens``.

    Raises what can be wrong with either before anything slow.
    """
    # imported here: other commands need none of it
    from kvevict.models import check_device, check_installed, load_model
    from kvevict.text import load_text

    check_installed(options.model)
    if options.device is not None:
        check_device(options.device)
    text = load_text(source)
    if text.notice:
        say(text.notice)
    loaded = load_model(options.model, device=options.device, dtype=options.dtype, notify=say)
    ids: list[int] = loaded.tokenizer(text.text, verbose=False)["input_ids"][:tokens]
    return loaded, text, ids
