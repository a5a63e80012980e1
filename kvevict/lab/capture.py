"""Records what a real model attends to: every full-attention layer, head and query, in blocks on disk."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvevict import host
from kvevict.cache import EvictingCache, human_bytes
from kvevict.errors import OptionError, OutputError, TraceError, UnsupportedModelError
from kvevict.files import nearest, write_file
from kvevict.lab.blockfile import Shape, block_path, write_block
from kvevict.lab.captured import FORMAT, HEADER, VERSION, finished_blocks, read_header
from kvevict.results import check_folder, environment

BLOCK = 64
"""Queries per block: 70 MB in half precision for 30 layers of 9 heads over 2,048 tokens."""


@dataclass(frozen=True)
class Captured:
    """A finished capture.

    raw_bytes, stored_bytes: before compression, and on disk.
    resumed:   tokens that were there already.
    row_error: the largest difference between a stored row's sum and the model's, of the blocks written now.
    """

    folder: Path
    raw_bytes: int
    stored_bytes: int
    resumed: int
    row_error: float


def plan(model: PreTrainedModel, ids: Tensor, block: int = BLOCK) -> Shape:
    """The sizes of a capture. Raises OptionError, and UnsupportedModelError for what no evicting cache can serve."""
    if ids.dim() != 1 or len(ids) < 2:
        raise OptionError(f"ids of shape {tuple(ids.shape)}: give one row of at least 2 tokens")
    if block < 1:
        raise OptionError(f"block={block}: give at least 1 query per block")
    with EvictingCache(model, "full", 1) as cache:  # refuses what it cannot serve, and says why
        layers = len(cache.evicting_layers)
    config: Any = host.decoder_config(model)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Shape(len(ids), layers, kv_heads, heads // kv_heads, head_dim, block)


def evicting_layers(model: PreTrainedModel) -> list[int]:
    """The model's layers that are captured, by their numbers in the model: those with full attention."""
    layers = DynamicCache(config=host.decoder_config(model)).layers
    return [index for index, layer in enumerate(layers) if host.is_full_attention(layer)]


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    ids: Tensor,
    folder: str | Path,
    *,
    source: str = "",
    block: int = BLOCK,
    about: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Captured:
    """Reads ``ids`` (N,) through ``model`` with nothing evicted, and writes its attention, keys and values.

    source:   what ``load_model`` takes to load this model again, to compare with results from inside it.
    block:    queries per forward and per file.
    about:    names of the model and the text, for results.
    progress: called with the number of tokens done since its last call.

    A folder with the beginning of the same capture is continued. The model runs eager attention meanwhile, and is
    put back. Raises TraceError for a folder that holds something else, and OutputError.
    """
    shape, folder = plan(model, ids, block), Path(folder).expanduser()
    done = _begin(folder, _header(model, ids, shape, source, about), shape)
    worst = 0.0
    if done == shape.blocks and progress is not None:
        progress(shape.tokens)
    ids = ids.to(model.device)
    with _recorded(model) as rows:
        cache = DynamicCache(config=host.decoder_config(model))
        evicting = evicting_layers(model)
        for index in range(shape.blocks if done < shape.blocks else 0):  # all of them, to have the keys of the first
            start, stop = shape.span(index)
            rows.clear()
            _forward(model, ids[None, start:stop], cache)
            if index >= done:
                weights = torch.stack([_rows_of(rows, layer, shape, stop) for layer in evicting])
                own = [cache.layers[layer] for layer in evicting]
                keys, values = (
                    torch.stack([getattr(layer, name)[0, :, start:stop].float().cpu() for layer in own])
                    for name in ("keys", "values")
                )
                worst = max(worst, write_block(folder, index, weights, keys, values))
            if progress is not None:
                progress(stop - start)
    stored = sum(block_path(folder, index).stat().st_size for index in range(shape.blocks))
    resumed = shape.span(done - 1)[1] if done else 0
    return Captured(folder, shape.nbytes, stored, resumed, worst)


def prepare(
    model: PreTrainedModel,
    ids: Tensor,
    folder: str | Path,
    *,
    source: str = "",
    block: int = BLOCK,
    about: dict[str, Any] | None = None,
) -> Shape:
    """The sizes of a capture, for whose beginning or continuation the folder is now ready.

    Arguments and errors are those of ``capture``.
    """
    shape = plan(model, ids, block)
    _begin(Path(folder).expanduser(), _header(model, ids, shape, source, about), shape)
    return shape


def _header(
    model: PreTrainedModel, ids: Tensor, shape: Shape, source: str, about: dict[str, Any] | None
) -> dict[str, Any]:
    """What a capture says of itself."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": source,
        **asdict(shape),
        "about": {"model": type(model).__name__, **(about or {})},
        "ids": ids.tolist(),
    }


def _begin(folder: Path, header: dict[str, Any], shape: Shape) -> int:
    """Makes the folder ready; returns how many blocks of this very capture it holds."""
    if folder.is_dir() and any(folder.iterdir()):
        there = read_header(folder)
        same = there.shape == shape and there.ids == header["ids"] and there.model == header["model"]
        about = [(there.about.get(name), header["about"].get(name)) for name in ("model", "revision")]
        if not same or any(None not in pair and pair[0] != pair[1] for pair in about):
            raise TraceError(
                f"{str(folder)!r} holds another capture ({there.about.get('model')}, {there.about.get('text')}, "
                f"{there.shape.tokens} tokens, {there.shape.block} per block): give another folder"
            )
        return finished_blocks(folder, shape)
    check_folder(folder)
    free = shutil.disk_usage(nearest(folder)).free
    if shape.nbytes > free:
        raise OutputError(
            f"the capture may need {human_bytes(shape.nbytes)} and {str(folder)!r} has {human_bytes(free)} free: give "
            "another folder, or fewer tokens"
        )
    document = {**header, "about": {**header["about"], **environment()}}
    write_file(folder / HEADER, json.dumps(document, indent=1).encode())
    return 0


@contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """The weights of each attention module's newest forward, by layer: (1, heads, q, W)."""
    rows: dict[int, Tensor] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if isinstance(weights, Tensor):
            rows[int(str(module.layer_idx))] = weights

    before, training = host.implementation(model), model.training
    with ExitStack() as stack:
        stack.callback(model.train, training)
        model.eval()
        if before != "eager":
            stack.callback(model.set_attn_implementation, before)
            model.set_attn_implementation("eager")
        for module in host.attention_modules(model):
            handle = module.register_forward_hook(record)
            stack.callback(handle.remove)
        yield rows


def _forward(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> None:
    arguments: dict[str, Any] = {host.cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # nobody reads them
    model(ids, **arguments)


def _rows_of(rows: dict[int, Tensor], layer: int, shape: Shape, seen: int) -> Tensor:
    """One layer's weights: (H, G, q, seen) float32 on the CPU."""
    weights = rows.get(layer)
    if weights is None or weights.shape[-1] != seen:
        got = "none" if weights is None else f"shape {tuple(weights.shape)}"
        raise UnsupportedModelError(
            f"layer {layer} returned no attention weights over the {seen} tokens seen ({got}): this model's eager "
            "attention cannot be captured"
        )
    found: Tensor = weights[0].float().cpu().unflatten(0, (shape.heads, shape.group))
    return found
