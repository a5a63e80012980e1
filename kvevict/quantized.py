"""Keys and values in 2 or 4 bits between forwards: a policy decides what stays, quantisation what that costs.

    reserve()   unpacks what is held, so that the forward finds plain keys and values
    settle()    evicts as ever, then packs what is left

As in transformers' quantised layers (KIVI, 2024, https://arxiv.org/abs/2402.02750), the newest tokens stay as they are
until ``residual_length`` of them have come; then everything held is packed anew. An evicted token among the packed
ones is a hole until that happens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvevict.books import gathered
from kvevict.errors import MissingPackageError, OptionError, UnsupportedModelError
from kvevict.inference import outside_inference_mode
from kvevict.layer import EvictingLayer
from kvevict.spec import Spec

NOBODY = 2**62
"""The position of no token, after all others."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """How keys and values are stored between forwards, in the words of transformers' ``QuantizedCache``.

    backend: "quanto", the package optimum-quanto.
    nbits:   2 or 4.
    axis_key, axis_value: 0. Groups along the last axis would mix tokens, and evicting one would change the others.
    q_group_size: consecutive numbers of one head that share a scale and a shift; it must divide the head size.
    residual_length: newest tokens that are kept in full precision, at most.

    Raises OptionError for other values. ``Quantized(**cache_config)`` takes the ``cache_config`` of a
    GenerationConfig.
    """

    backend: str = "quanto"
    nbits: int = 4
    axis_key: int = 0
    axis_value: int = 0
    q_group_size: int = 64
    residual_length: int = 128

    def __post_init__(self) -> None:
        self._check("backend", self.backend == "quanto", "'quanto'; others quantise tokens together")
        self._check("nbits", self.nbits in (2, 4), "2 or 4")
        for axis in ("axis_key", "axis_value"):
            self._check(axis, getattr(self, axis) == 0, "0; other axes quantise tokens together")
        for count in ("q_group_size", "residual_length"):
            value = getattr(self, count)
            self._check(count, isinstance(value, int) and not isinstance(value, bool) and value >= 1, "1 or more")

    def _check(self, option: str, ok: bool, expected: str) -> None:
        if not ok:
            raise OptionError(f"Quantized({option}={getattr(self, option)!r}): expected {expected}")

    def check_head(self, size: int | None) -> None:
        """Raises OptionError if groups do not divide a head of ``size`` numbers, so that tokens would share one."""
        if size is not None and size % self.q_group_size:
            raise OptionError(
                f"Quantized(q_group_size={self.q_group_size}): the model's heads have {size} numbers, which groups of "
                "that size do not divide, so that tokens would share a group: give a divisor of the head size"
            )


NAMES = {"quanto4": Quantized(), "quanto2": Quantized(nbits=2)}
"""Short names of storages."""


def storage_of(storage: Quantized | str | None) -> Quantized | None:
    """The storage that a user named. Raises OptionError, or MissingPackageError without its package."""
    if storage is None or isinstance(storage, Quantized):
        chosen = storage
    elif isinstance(storage, str) and storage in NAMES:
        chosen = NAMES[storage]
    else:
        raise OptionError(
            f"storage={storage!r}: expected None, {', '.join(map(repr, NAMES))}, or kvevict.Quantized(nbits=..., "
            "q_group_size=..., residual_length=...)"
        )
    if chosen is not None:
        _quanto()
    return chosen


def _quanto() -> Any:
    try:
        return importlib.import_module("optimum.quanto")
    except ImportError as error:
        raise MissingPackageError(
            f"quantised storage needs the package optimum-quanto ({error}): pip install 'kvevict[quanto]'"
        ) from error


class QuantizedLayer(EvictingLayer):
    """Holds at most its budget of tokens per KV head, packed while no forward is under way.

    Between forwards ``keys`` and ``values`` have no slots. What is held is found by position:

    packed:  keys and values of all tokens held when it was filled, (B, H, P, D) twice, for rows ``packed_rows``.
    newest:  those of tokens that came since and are still held, (B, H, R, D) twice.
    """

    def __init__(self, spec: Spec, index: int, how: Quantized) -> None:
        self.how = how
        super().__init__(spec, index)

    def clear(self) -> None:
        """Holds and knows nothing."""
        super().clear()
        self.packed: tuple[Packed, Packed] | None = None
        self.packed_positions: Tensor | None = None  # (B, H, P), NOBODY where a row has fewer
        self.packed_rows: Tensor | None = None  # (B,) which of the packed rows is which; None: they are in order
        self.packed_seen = 0  # columns seen when it was filled
        self.border: int | Tensor = 0  # the first position that is not packed: an int, or (B, 1, 1)
        self.newest: tuple[Tensor, Tensor] | None = None
        self.newest_positions: Tensor | None = None  # (B, H, R), NOBODY where a row has fewer

    is_croppable = False  # packing cannot be taken back
    stays_put = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raises UnsupportedModelError for heads whose size the config did not tell and groups do not divide."""
        for states in (key_states, value_states):
            if states.shape[-1] % self.how.q_group_size:
                raise UnsupportedModelError(
                    f"heads of {states.shape[-1]} numbers cannot be stored in groups of q_group_size="
                    f"{self.how.q_group_size}: give a divisor of the head size"
                )
        super().lazy_initialization(key_states, value_states)

    def reserve(self, tokens: int) -> None:
        """Finds slots for the new tokens, and unpacks what is held."""
        super().reserve(tokens)
        self._unpack()

    def settle(self, rescore: Callable[[Tensor], Tensor] | None = None) -> None:
        """Evicts down to the budget, then packs."""
        super().settle(rescore)
        self._pack()

    # -- packing ---------------------------------------------------------------------------------------------

    @outside_inference_mode
    @torch.no_grad()
    def _unpack(self) -> None:
        """Puts the keys and values of every token where its slot is."""
        if self.packed is None:
            return
        assert self.packed_positions is not None and self.newest is not None and self.newest_positions is not None
        assert self.positions is not None
        keys, values = (each.plain() for each in self.packed)
        positions = self.packed_positions
        if self.packed_rows is not None:
            keys, values, positions = (t.index_select(0, self.packed_rows) for t in (keys, values, positions))
        known, order = torch.cat([positions, self.newest_positions], 2).sort(-1)  # (B, H, P + R)
        place = torch.searchsorted(known, self.positions).clamp_max(known.shape[2] - 1)  # (B, H, capacity)
        source = order.gather(2, place)  # an empty slot, or a new token's, gets any token's
        self.keys = gathered(torch.cat([keys, self.newest[0]], 2), source)
        self.values = gathered(torch.cat([values, self.newest[1]], 2), source)

    @outside_inference_mode
    @torch.no_grad()
    def _pack(self) -> None:
        """Stores what is held, and lets go of the plain keys and values."""
        assert self.keys is not None and self.values is not None
        if not self.keys.shape[2]:
            return
        used = self.slot_positions
        used = used.masked_fill(used < 0, NOBODY)
        if self.packed is None or self.seen - self.packed_seen >= self.how.residual_length:
            self.packed_positions, keys, values = self._chosen(used)
            self.packed = self._quantized(keys), self._quantized(values)
            self.packed_rows, self.packed_seen = None, self.seen
            self.border = self.seen if self.row_seen is None else self.row_seen[:, None, None]
            used = torch.full_like(used, NOBODY)
        self.newest_positions, *newest = self._chosen(used.masked_fill(used < self.border, NOBODY))
        self.newest = newest[0], newest[1]
        self.keys, self.values = self.keys[:, :, :0].clone(), self.values[:, :, :0].clone()

    def _chosen(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, keys and values of the slots whose position is not NOBODY's, oldest first."""
        ascending, order = positions.sort(-1)
        longest = int((ascending != NOBODY).sum(-1).max()) if ascending.numel() else 0
        kept = order[:, :, :longest]
        return ascending[:, :, :longest].clone(), gathered(self.keys, kept), gathered(self.values, kept)

    def _quantized(self, tensor: Tensor) -> Packed:
        quanto, tensor = _quanto(), tensor.contiguous()
        kind = quanto.qint4 if self.how.nbits == 4 else quanto.qint2
        scale, shift = quanto.MaxOptimizer()(tensor, kind, 0, self.how.q_group_size)
        return Packed(quanto.quantize_weight(tensor, kind, 0, scale, shift, self.how.q_group_size, optimized=False))

    # -- storage ---------------------------------------------------------------------------------------------

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer keeps alive; of packed ones, the plain tensors within."""
        own = (self.packed_positions, self.packed_rows, self.newest_positions, self.border, *(self.newest or ()))
        leaves = [leaf for packed in self.packed or () for leaf in packed.leaves()]
        return [*super().tensors(), *(t for t in own if isinstance(t, Tensor)), *leaves]

    _PACKED = ("packed_positions", "packed_rows", "packed_seen", "border", "newest_positions")

    def books(self) -> dict[str, Any]:
        """Everything that a later forward depends on."""
        packed, newest = self.packed, self.newest
        return super().books() | {name: getattr(self, name) for name in self._PACKED} | {
            "storage": asdict(self.how),
            "packed": None if packed is None else [each.apart() for each in packed],
            "newest": None if newest is None else list(newest),
        }  # fmt: skip  # one dict

    def restore(self, books: dict[str, Any]) -> None:
        """Continues from what ``books`` gave."""
        super().restore(books)
        for name in self._PACKED:
            setattr(self, name, books[name])
        if books["packed"] is not None:
            keys, values = (_together(each) for each in books["packed"])
            self.packed, self.newest = (keys, values), tuple(books["newest"])

    def _rows(self, move: Callable[[Tensor], Tensor]) -> None:
        super()._rows(move)
        if self.packed is None:
            return
        assert self.newest is not None and self.newest_positions is not None
        if self.packed_rows is None:
            rows = self.newest_positions.shape[0]  # before this move, as many as were packed
            self.packed_rows = torch.arange(rows, device=self.newest_positions.device)
        self.packed_rows, self.newest_positions = move(self.packed_rows), move(self.newest_positions)
        self.newest = move(self.newest[0]), move(self.newest[1])
        if isinstance(self.border, Tensor):
            self.border = move(self.border)


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor of quanto's, which wraps others. It is never written to, so copies share it."""

    tensor: Any

    def plain(self) -> Tensor:
        """The numbers it stands for."""
        numbers: Tensor = self.tensor.dequantize()
        return numbers

    def leaves(self) -> list[Tensor]:
        """The plain tensors within."""
        return list(_leaves(self.tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _together, (self.apart(),)

    def apart(self) -> Any:
        """Plain tensors and words, from which ``_together`` makes it again."""
        return _apart(self.tensor)


def _leaves(tensor: Any) -> Iterator[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _leaves(getattr(tensor, name))


def _apart(tensor: Any) -> Any:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    names, meta = tensor.__tensor_flatten__()
    inner = {name: _apart(getattr(tensor, name)) for name in names}
    return {"kind": type(tensor).__name__, "inner": inner, "meta": meta}


def _together(parts: Any) -> Packed:
    return Packed(_joined(parts))


def _joined(parts: Any) -> Any:
    if isinstance(parts, Tensor):
        return parts
    inner = {name: _joined(each) for name, each in parts["inner"].items()}
    kinds = {"WeightQBitsTensor": _quanto().WeightQBitsTensor, "PackedTensor": _quanto().tensor.packed.PackedTensor}
    return kinds[parts["kind"]].__tensor_unflatten__(inner, parts["meta"], None, None)
