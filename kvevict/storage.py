"""Caches on disk: a safetensors file with the tensors and a small JSON file with everything else.

folder/cache.safetensors
folder/cache.json
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvevict.errors import OutputError, StoredCacheError, WrongModelError
from kvevict.files import replace, write_file
from kvevict.policies import POLICIES, make_policy
from kvevict.policies.base import Policy

FORMAT = 1
TENSORS, BOOKS = "cache.safetensors", "cache.json"


def save(policy: Policy, budget: int | float, states: Sequence[dict[str, Any]], model: nn.Module, folder: Path) -> None:
    """Writes both files, each whole or not at all. ``states``: what every layer knows, by name."""
    tensors: dict[str, Tensor] = {}
    layers = [_pack(state, f"{index}", tensors) for index, state in enumerate(states)]
    registered = POLICIES.get(policy.name) is type(policy)
    books: dict[str, Any] = {
        "format": FORMAT,
        "id": secrets.token_hex(8),
        "transformers": transformers.__version__,
        "model": fingerprint(model),
        "policy": policy.name if registered else None,
        "policy_class": f"{type(policy).__module__}.{type(policy).__qualname__}",
        "options": dataclasses.asdict(policy) if registered else None,
        "budget": budget,
        "layers": layers,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: the cache cannot be written ({error})") from error
    replace(folder / TENSORS, lambda path: save_file(tensors, path, {"id": books["id"]}))
    write_file(folder / BOOKS, (json.dumps(books, indent=1) + "\n").encode())


def read(folder: Path, model: nn.Module, policy: Policy | None) -> tuple[Policy, int | float, list[dict[str, Any]]]:
    """The policy, the budget, and the state of every layer.

    Raises StoredCacheError for files that are not a whole cache of a format this release reads, and WrongModelError
    for a cache of another model.
    """
    try:
        books = json.loads((folder / BOOKS).read_text("utf-8"))
        with safe_open(folder / TENSORS, "pt") as file:
            written = (file.metadata() or {}).get("id")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise StoredCacheError(
            f"{folder}: no cache can be read here ({error}): give the folder that cache.save() wrote"
        ) from error
    if not isinstance(books, dict) or books.get("format") != FORMAT:
        found = books.get("format") if isinstance(books, dict) else None
        raise StoredCacheError(
            f"{folder}: the cache has format {found!r}, and this release reads format {FORMAT}: fill the cache again"
        )
    if books["id"] != written:
        raise StoredCacheError(f"{folder}: {TENSORS} and {BOOKS} belong to different caches: fill the cache again")
    check_model(books["model"], fingerprint(model), str(folder))
    if policy is None:
        if books["policy"] is None:
            raise StoredCacheError(
                f"{folder}: the cache was filled under {books['policy_class']}, which kvevict cannot build: pass "
                "policy=, an instance with the same options"
            )
        policy = make_policy(books["policy"], **books["options"])
    elif f"{type(policy).__module__}.{type(policy).__qualname__}" != books["policy_class"] or (
        books["options"] is not None and dataclasses.asdict(policy) != books["options"]
    ):
        raise StoredCacheError(f"{folder}: the cache was filled under {books['policy_class']}, not under {policy!r}")
    return policy, books["budget"], [_unpack(layer, tensors) for layer in books["layers"]]


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """What a cache depends on: the model's class, its shapes, and a few of its weights where they are at hand."""
    shapes = hashlib.sha256()
    weights: hashlib._Hash | None = hashlib.sha256()
    for name, parameter in model.named_parameters():
        shapes.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.device.type == "meta":
            weights = None
        elif weights is not None:
            few = parameter.detach().flatten()[:8].to("cpu", torch.float32)
            weights.update(few.contiguous().numpy().tobytes())
    return {
        "class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "shapes": shapes.hexdigest()[:16],
        "weights": None if weights is None else weights.hexdigest()[:16],
    }


def check_model(stored: dict[str, Any], own: dict[str, Any], where: str) -> None:
    """Raises WrongModelError if two fingerprints are not of the same model."""
    for what in ("class", "dtype", "shapes", "weights"):
        if stored[what] != own[what] and None not in (stored[what], own[what]):
            raise WrongModelError(
                f"{where} was filled by another model ({what} {stored[what]}, here {own[what]}): its keys and values "
                "mean nothing to this one"
            )


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, its tensors put into ``tensors`` under names that begin with ``name``."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name, "device": str(value.device)}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(each, f"{name}.{key}", tensors)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_pack(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise OutputError(f"layer state {name} of type {type(value).__name__} cannot be saved")


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return tensors[packed["tensor"]].to(_device(packed["device"]))
    if "dict" in packed:
        return {key: _unpack(each, tensors) for key, each in packed["dict"]}
    if "list" in packed:
        return [_unpack(each, tensors) for each in packed["list"]]
    if "dtype" in packed:
        return getattr(torch, packed["dtype"])
    return _device(packed["device"])


def _device(name: str) -> torch.device:
    """The device of that name, or the CPU where this machine has none such: the first forward moves what it needs."""
    device = torch.device(name)
    return device if device.type == "cpu" or torch.accelerator.is_available() else torch.device("cpu")
