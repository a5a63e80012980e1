"""Llamas of a given shape with random weights: speed and memory do not depend on what the weights are."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvevict.errors import ModelError, OptionError


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama that its speed and memory depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Weights, with one matrix for embeddings and output."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden + self.hidden

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())


SHAPES = {
    # Llama 3.2 1B and 3B, and Llama 3.1 8B, as their config.json say
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256),
    "3b": Shape(28, 3072, 24, 8, 128, 8192, 128256),
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
}


def parse_shape(given: str) -> Shape:
    """A shape by name, or "layers=2,hidden=64,heads=4,kv_heads=2", with more of the numbers if wanted.

    Left out, head_dim is hidden / heads, intermediate four times hidden, vocabulary 32,000. Raises OptionError.

    >>> parse_shape("layers=2,hidden=64,heads=4,kv_heads=2").head_dim
    16
    """
    if given.lower() in SHAPES:
        return SHAPES[given.lower()]
    known = [each.name for each in dataclasses.fields(Shape)]
    try:
        pairs = [(name.strip(), int(value)) for name, value in (pair.split("=") for pair in given.split(","))]
        numbers = dict(pairs)
        if len(numbers) < len(pairs):
            raise ValueError("a number is given twice")
        hidden, heads = numbers["hidden"], numbers["heads"]
        derived = {"kv_heads": heads, "head_dim": hidden // heads, "intermediate": 4 * hidden, "vocabulary": 32000}
        shape = Shape(**{**derived, **numbers})
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise OptionError(
            f"shape {given!r}: give {', '.join(SHAPES)}, or numbers such as layers=2,hidden=64,heads=4,kv_heads=2 "
            f"(of {', '.join(known)})"
        ) from error
    if min(dataclasses.astuple(shape)) < 1 or shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise OptionError(
            f"shape {shape}: give numbers of at least 1, heads that kv_heads divide, and an even head_dim"
        )
    return shape


def random_model(
    shape: Shape, *, device: str = "cpu", dtype: torch.dtype = torch.float32, positions: int = 131072
) -> PreTrainedModel:
    """A Llama of that shape with random weights, in evaluation mode. Raises ModelError if it cannot fit."""
    _check_room(shape, torch.device(device), dtype)
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    before, state = torch.get_default_dtype(), torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)  # so that no float32 copy is made first
        with torch.device(device):
            model: PreTrainedModel = LlamaForCausalLM(config)
    except RuntimeError as error:
        raise ModelError(f"a model of shape {shape} does not fit on device {device!r}: {error}") from error
    finally:
        torch.set_default_dtype(before)
        torch.random.set_rng_state(state)
    model.eval()
    return model


def _check_room(shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelError before a machine runs out of memory, where it says how much it has."""
    needed = shape.parameters * dtype.itemsize
    room: int | None = None
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu" and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if room is not None and needed > room:
        raise ModelError(
            f"a model of shape {shape} takes {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, and "
            f"{device} has {room / 2**30:.1f} GiB left: give a smaller --shape, or another --dtype or --device"
        )
