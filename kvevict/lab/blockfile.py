"""Blocks of captured attention on disk: half precision, bytes shuffled, compressed, and checked when read.

One file holds consecutive queries of all layers:

    magic (8 bytes) | CRC-32 of the rest (4) | compressed length (8) | compressed: weights, keys, values

Weights are stored as float16 of 256 times their value, so that weights down to 1e-10 survive.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvevict.errors import EvaluationError, TraceError
from kvevict.files import write_file
from kvevict.lab.traces import Block

MAGIC = b"KVEVICT\x01"
_HEADER = struct.Struct("<8sIQ")
SCALE = 256
LEVEL = 1
"""Of zlib. Higher levels measured a few percent smaller and several times slower."""
ROW_ERROR = 1e-3
"""How far a stored row's sum may be from the sum that the model's attention had."""


@dataclass(frozen=True)
class Shape:
    """The sizes that all blocks of a capture share; a block's queries and positions depend on its place."""

    tokens: int
    layers: int
    heads: int
    group: int
    head_dim: int
    block: int

    def span(self, index: int) -> tuple[int, int]:
        """Positions of a block's first query and of the one after its last."""
        return index * self.block, min((index + 1) * self.block, self.tokens)

    @property
    def blocks(self) -> int:
        """How many files a whole capture has."""
        return -(-self.tokens // self.block)

    def parts(self, index: int) -> list[tuple[int, ...]]:
        """Shapes of a block's weights, keys and values."""
        start, stop = self.span(index)
        own = (self.layers, self.heads, stop - start, self.head_dim)
        return [(self.layers, self.heads, self.group, stop - start, stop), own, own]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole capture before compression."""
        return 2 * sum(torch.Size(part).numel() for index in range(self.blocks) for part in self.parts(index))


def block_path(folder: Path, index: int) -> Path:
    """The file of one block."""
    return folder / f"block-{index:05d}.kva"


def write_block(folder: Path, index: int, weights: Tensor, keys: Tensor, values: Tensor) -> float:
    """Writes a block, whole or not at all; returns the largest error of a row's sum.

    weights: (T, H, G, q, W); keys, values: (T, H, q, D). Raises EvaluationError for weights that are not finite, or
    that half precision cannot hold, and OutputError.
    """
    stored = (weights.float() * SCALE).half()
    error = float((stored.float().sum(-1) / SCALE - weights.float().sum(-1)).abs().max())
    if not error <= ROW_ERROR:  # NaN is not
        raise EvaluationError(
            f"block {index}: the sum of a row differs by {error:.2g} from the model's once it is stored in half "
            "precision. If the model's activations overflowed, load it in float32"
        )
    raw = b"".join(_shuffled(part.half()) for part in (stored, keys, values))
    packed = zlib.compress(raw, LEVEL)
    write_file(block_path(folder, index), _HEADER.pack(MAGIC, zlib.crc32(packed), len(packed)) + packed)
    return error


def check_block(path: Path) -> None:
    """Raises TraceError if the file is not a block, or is shorter or longer than it says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(_HEADER.size)
    except OSError as error:
        raise TraceError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    if len(head) < _HEADER.size or head[:8] != MAGIC:
        raise TraceError(f"{str(path)!r} is not a block of captured attention, or its beginning is lost: {_REMEDY}")
    packed = _HEADER.unpack(head)[2]
    if size != _HEADER.size + packed:
        raise TraceError(f"{str(path)!r} has {size} bytes, expected {_HEADER.size + packed}: {_REMEDY}")


_REMEDY = "delete it, and the same kvevict capture makes it anew"


def read_block(folder: Path, index: int, shape: Shape) -> Block:
    """Reads a block. Raises TraceError."""
    path = block_path(folder, index)
    check_block(path)
    content = path.read_bytes()
    _, checksum, _ = _HEADER.unpack(content[: _HEADER.size])
    packed = content[_HEADER.size :]
    if zlib.crc32(packed) != checksum:
        raise TraceError(f"{str(path)!r} is damaged (its checksum is wrong): {_REMEDY}")
    raw = bytearray(zlib.decompress(packed))
    parts = shape.parts(index)
    if len(raw) != 2 * sum(torch.Size(part).numel() for part in parts):
        raise TraceError(f"{str(path)!r} belongs to another capture: {_REMEDY}")
    found, at = [], 0
    for part in parts:
        size = 2 * torch.Size(part).numel()
        found.append(_unshuffled(memoryview(raw)[at : at + size], part))
        at += size
    weights, keys, values = found
    return Block(shape.span(index)[0], weights.float() / SCALE, keys.float(), values.float())


def _shuffled(half: Tensor) -> bytes:
    """All low bytes, then all high ones: exponents side by side compress better."""
    pairs = half.contiguous().view(torch.uint8).view(-1, 2)
    return bytes(pairs.t().contiguous().numpy().data)


def _unshuffled(raw: memoryview, shape: tuple[int, ...]) -> Tensor:
    pairs = torch.frombuffer(raw, dtype=torch.uint8).view(2, -1).t().contiguous()
    return pairs.view(-1).view(torch.float16).view(shape)
