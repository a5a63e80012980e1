"""One layer's cache and attention as a single operator, so that ``torch.compile`` makes one graph of a forward.

What a cache does depends on its state, which no graph can hold. While a forward is traced, ``update`` therefore only
marks the new keys, and the attention that receives them becomes a call of ``kvevict::attend``. When the graph runs,
the operator updates the cache and attends as an uncompiled forward does. Sizes that grow with the text never meet the
graph, so that nothing is compiled again for them.

Where the attention is more than softmax(q k) v, or gradients are needed, the graph is interrupted instead.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvevict import masks
from kvevict.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from kvevict.cache import EvictingCache

_numbers = itertools.count(2)  # a compiler takes 0 and 1 for constants
_caches: weakref.WeakValueDictionary[int, EvictingCache] = weakref.WeakValueDictionary()


def enrol(cache: EvictingCache) -> int:
    """A number by which the operator finds ``cache`` as long as it lives."""
    number = next(_numbers)
    _caches[number] = cache
    return number


@dataclass(frozen=True)
class Deferred:
    """An update that was traced: it is done together with the attention that follows it."""

    cache: EvictingCache
    layer: int
    key: Tensor
    value: Tensor

    def check(self, module: nn.Module, value: Tensor) -> None:
        """Raises if another model's attention, or one that changes the values first, comes after the update.

        A forward whose tracing raises runs uncompiled.
        """
        self.cache.check_module(module)
        if value is not self.value:
            raise UnsupportedOperationError(
                f"{type(module).__name__} changes the values that the cache returned: it cannot be compiled with an "
                "EvictingCache"
            )
        self.cache.awaited = None

    def in_graph(self, query: Tensor, mask: Tensor | None, arguments: Mapping[str, Any]) -> Tensor:
        """The operator."""
        scaling, is_causal = arguments.get("scaling"), arguments.get("is_causal")
        result: Tensor = attend(query, self.key, self.value, mask, self.cache.number, self.layer, scaling, is_causal)
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not say what it returns
    def apart(self, query: Tensor, mask: Tensor | None, arguments: Mapping[str, Any]) -> Tensor:
        """The same between two graphs."""
        return self.cache.attend(self.layer, query, self.key, self.value, _needed(mask, query), **arguments)


def can_defer(cache: EvictingCache) -> bool:
    """Whether the attention that follows an update will be ours."""
    attachment = cache.attachment
    return (
        attachment is not None
        and attachment.active
        and attachment.base != "eager"
        and cache.base_now == attachment.base
    )


@torch.library.custom_op("kvevict::attend", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    cache: int,
    layer: int,
    scaling: float | None,
    is_causal: bool | None,
) -> Tensor:
    """Stores new keys and values (B, H, Q, D) and attends: queries (B, heads, Q, D) give (B, Q, heads, D)."""
    own = None if mask is None else mask.detach()  # what was found out about another in this memory is not its own
    needed = _needed(own, query)
    output = _caches[cache].attend(layer, query, key, value, needed, scaling=scaling, is_causal=is_causal)
    return output.contiguous()


@attend.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, heads, tokens, _size = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


def _needed(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask, or None if it hides nothing from a single query: a forward that is traced cannot find that out."""
    return None if mask is not None and query.shape[2] == 1 and masks.is_causal(mask) else mask
