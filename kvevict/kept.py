"""What is held when, told by when each token left: at every step, at every age, by every KV head.

``left`` is (layers, KV heads, tokens): how many tokens had been seen when a token left, and 0 for those that never did.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvevict.errors import OutputError

KEPT, HELD, HEADS, TOKENS = "kept.npz", "held.jsonl", "heads.jsonl", "tokens.json"
"""Files of kvevict diagnose: ``left`` by policy and budget, rows of how many KV heads hold each token, rows of each
head, and the text."""


def held_after(left: Tensor, seen: int) -> Tensor:
    """Which tokens are held after ``seen`` tokens: (..., length) int -> bool.

    >>> held_after(torch.tensor([0, 3, 5]), 3)
    tensor([ True, False,  True])
    """
    came = torch.arange(left.shape[-1]) < seen
    return came & ((left == 0) | (left > seen))


def held_by_heads(left: Tensor, seen: int) -> Tensor:
    """How many KV heads of all layers hold each token after ``seen`` tokens: (..., H, length) -> (length,)."""
    return held_after(left, seen).flatten(0, -2).sum(0)


def survival(left: Tensor) -> Tensor:
    """Of all tokens that reached an age, the share still held then: (..., length) -> (length,) float64.

    A token's age is the number of tokens that came after it. The older, the fewer tokens there are to count.

    >>> survival(torch.tensor([0, 2, 4, 0]))  # the second left when it came, the third when the fourth came
    tensor([0.7500, 0.3333, 0.5000, 1.0000], dtype=torch.float64)
    """
    length = left.shape[-1]
    left = left.reshape(-1, length).long()
    born = torch.arange(length)
    ages = torch.where(left == 0, length - born, left - 1 - born)  # how many ages, from 0 on, each was held at
    ended = torch.bincount(ages.flatten(), minlength=length + 1).double()  # by the number of ages held at
    held = ended.flip(0).cumsum(0).flip(0)[1:]  # held at age a: more than a ages
    return held / (len(left) * (length - born))


def packed(kept: Mapping[tuple[str, int], Tensor]) -> bytes:
    """The contents of ``KEPT``: an array for each (name, budget)."""
    import numpy

    stream = io.BytesIO()
    arrays: dict[str, Any] = {}
    for (name, budget), left in kept.items():
        small = torch.int16 if left.shape[-1] < torch.iinfo(torch.int16).max else torch.int32
        arrays[f"{name}@{budget}"] = left.to(small).numpy()
    numpy.savez_compressed(stream, **arrays)
    return stream.getvalue()


def read_kept(folder: Path) -> dict[tuple[str, int], Tensor]:
    """``left`` by (name, budget), from the results of kvevict diagnose. Raises OutputError for a damaged file."""
    import numpy

    try:
        with numpy.load(folder / KEPT, allow_pickle=False) as arrays:
            cells = {name: name.rpartition("@") for name in arrays.files}
            return {(cell[0], int(cell[2])): torch.from_numpy(arrays[name]).int() for name, cell in cells.items()}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise OutputError(f"{str(folder / KEPT)!r} cannot be read ({error}): run kvevict diagnose again") from error


def read_tokens(folder: Path) -> list[str]:
    """The text, token by token; may be empty. Raises OutputError."""
    path = folder / TOKENS
    try:
        tokens = json.loads(path.read_text("utf-8"))
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError("expected a list of strings")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{str(path)!r} cannot be read ({why}): run kvevict diagnose again") from error
    return tokens
