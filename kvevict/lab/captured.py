"""Reads what ``kvevict capture`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvevict.errors import TraceError
from kvevict.lab.blockfile import Shape, block_path, check_block, read_block
from kvevict.lab.traces import Block, Trace

HEADER = "capture.json"
FORMAT, VERSION = "kvevict attention", 1
SHAPE = ("tokens", "layers", "heads", "group", "head_dim", "block")


@dataclass(frozen=True)
class Header:
    """What a capture says of itself.

    ids:    the tokens that were read.
    model:  what ``load_model`` takes.
    about:  everything else, for results.
    """

    shape: Shape
    ids: list[int]
    model: str
    about: dict[str, Any]


def read_header(folder: Path) -> Header:
    """The header of a captured trace. Raises TraceError for anything else."""
    path = folder / HEADER
    if not path.is_file():
        raise TraceError(f"{str(folder)!r} is not a captured trace: it has no {HEADER}. Make one with kvevict capture")
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["format"] != FORMAT:
            raise KeyError("format")
        version = int(document["version"])
        shape = Shape(**{name: int(document[name]) for name in SHAPE})
        about = dict(document["about"])
        header = Header(shape, [int(token) for token in document["ids"]], str(document["model"]), about)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"  # its repr may hold the whole file
        raise TraceError(f"{str(path)!r} is not the header of a captured trace ({why})") from error
    if version != VERSION:
        raise TraceError(f"{str(folder)!r} has format {version}, and this kvevict reads {VERSION}: capture it again")
    if min(getattr(shape, name) for name in SHAPE) < 1 or len(header.ids) != shape.tokens:
        raise TraceError(f"{str(path)!r} is damaged: its numbers do not fit one another")
    return header


def finished_blocks(folder: Path, shape: Shape) -> int:
    """How many blocks there are before the first that is missing. Raises TraceError for a damaged one."""
    for index in range(shape.blocks):
        if not block_path(folder, index).exists():
            return index
        check_block(block_path(folder, index))
    return shape.blocks


def captured_trace(folder: str | Path, length: int | None = None) -> Trace:
    """The trace in a folder of ``kvevict capture``, or its first ``length`` tokens.

    An interrupted capture is read as far as it goes, and ``about["notice"]`` says so. Raises TraceError.
    """
    folder = Path(folder).expanduser()
    header = read_header(folder)
    shape = header.shape
    blocks = finished_blocks(folder, shape)
    if not blocks:
        raise TraceError(f"{str(folder)!r} has no finished block: run the same kvevict capture again")
    there = shape.span(blocks - 1)[1]
    if length is not None and not 2 <= length <= there:
        raise TraceError(f"length={length}: {str(folder)!r} holds {there} tokens; give from 2 to {there}")
    tokens = there if length is None else length
    about = {**header.about, "length": tokens}
    if there < shape.tokens:
        about["notice"] = f"the capture was interrupted after {there} of {shape.tokens} tokens"

    def make() -> Iterator[Block]:
        for index in range(blocks):
            start, stop = shape.span(index)
            if start >= tokens:
                return
            block = read_block(folder, index, shape)
            if stop > tokens:
                own = tokens - start
                assert block.keys is not None and block.values is not None
                weights = block.weights[:, :, :, :own, :tokens]
                block = Block(start, weights, block.keys[:, :, :own], block.values[:, :, :own])
            yield block

    return Trace(
        name=folder.name or str(folder),
        length=tokens,
        make=make,
        layers=shape.layers,
        heads=shape.heads,
        group=shape.group,
        dtype=torch.float32,
        has_keys=True,
        about=about,
    )
