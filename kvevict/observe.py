"""How the attention that follows ``cache.update`` is seen, without patching anything that other models use.

Three ways, by what the policy needs and what the model runs:

* Policies that need no attention, on sdpa or eager: nothing is installed. Where the mask must be fixed or
  padding is still unknown, ``update`` returns keys that report the mask they are used with (``Probe``).
* Eager attention: hooks on the attention modules of this model read the weights that eager returns.
* Any other kernel: the attention modules of this model are told to call a function of ours, which calls the
  kernel and then recomputes the rows that the policy asked for from the same query and key tensors.

``detach`` puts the model back exactly. Calls with other caches go straight to what the model had before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig

from kvevict import compiled, drafts, host, masks
from kvevict.drafts import RowSource
from kvevict.errors import ObservationError, WrongModelError
from kvevict.statistics import attend, attention_rows
from kvevict.steady import Member

if TYPE_CHECKING:
    from kvevict.cache import EvictingCache
    from kvevict.layer import EvictingLayer


Function = TypeVar("Function", bound=Callable[..., Any])
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def uncompiled(function: Function) -> Function:
    """Kept out of what ``torch.compile`` traces: what happens here depends on the state of a cache."""
    apart = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # `apart` costs as much as a few small tensor operations, so that it is called only where it is needed
        return apart(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return cast(Function, call)


class Ticket:
    """One forward of one layer, from ``update`` to the attention that follows it."""

    def __init__(self, cache: EvictingCache, layer: EvictingLayer, maskless: bool = False) -> None:
        self.cache = cache
        self.layer = layer
        self.maskless = maskless  # the attention module was given no mask

    def exact_mask(self, mask: Tensor | None, heads: int, rows: RowSource | None = None) -> Tensor | None:
        """The mask this forward's attention must use. ``rows`` gives its rows, should it be a draft."""
        exact = self.layer.exact_mask(mask, heads)
        if self.layer.steady is not None:
            self.layer.steady.unmasked = self.maskless
        if self.layer.draft is None:
            return exact
        with torch.no_grad():
            return drafts.rehearse(self.layer, exact, heads, rows)

    def finish(self, blocks: Iterable[tuple[int, Tensor]] = ()) -> None:
        """Shows the policy its attention rows, then evicts. A draft waits until it is accepted."""
        if self.layer.draft is not None:
            self.layer.pending = False
            return
        with torch.no_grad():
            self.layer.observe(blocks)
            self.cache.settle(self.layer)


# -- nothing installed -----------------------------------------------------------------------------------------

_SAME_SCORES = {
    torch.Tensor.matmul, torch.matmul, torch.Tensor.__matmul__, torch.Tensor.mul, torch.mul, torch.Tensor.__mul__,
    torch.Tensor.__rmul__, torch.Tensor.div, torch.div, torch.Tensor.__truediv__, torch.Tensor.tanh, torch.tanh,
    torch.Tensor.expand, torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.transpose, torch.transpose,
    torch.Tensor.__getitem__, torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.float, torch.Tensor.type,
    torch.Tensor.unsqueeze, torch.Tensor.repeat_interleave, torch.repeat_interleave,
}  # fmt: skip  # one line per family reads better than thirty
_ADDITIONS = {torch.Tensor.add, torch.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__}


class Probe(torch.Tensor):
    """Keys that hand their ticket the mask they are attended with, under sdpa or eager attention.

    The mask is replaced by the exact one. Only the tensors on the way from keys to the mask stay probes.
    """

    ticket: Ticket
    heads: int

    @classmethod
    def of(cls, keys: Tensor, ticket: Ticket) -> Probe:
        """The same tensor, watched."""
        probe = keys.as_subclass(cls)
        probe.ticket = ticket
        return probe

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        probe = next(a for a in (*args, *kwargs.values()) if isinstance(a, Probe))
        ticket = getattr(probe, "ticket", None)
        with torch._C.DisableTorchFunctionSubclass():
            if ticket is None:
                return func(*args, **kwargs)
            if func is F.scaled_dot_product_attention:
                return cls._sdpa(ticket, *args, **kwargs)
            if func in _ADDITIONS:
                return cls._add(ticket, probe, func, args, kwargs)
            result = func(*args, **kwargs)
        if func in _SAME_SCORES and isinstance(result, Tensor):
            return cls.of(result, ticket)
        return result

    @staticmethod
    @uncompiled
    def _add(ticket: Ticket, probe: Probe, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Eager attention adds its mask to the logits: adds the exact one instead."""
        operands = []
        for operand in args:
            if isinstance(operand, Tensor) and operand is not probe:
                exact = ticket.exact_mask(operand, probe.shape[1])
                operand = None if exact is None else masks.additive(exact, probe.dtype)
            operands.append(operand)
        result = func(*operands, **kwargs)
        ticket.finish()
        return result

    @staticmethod
    @uncompiled
    def _sdpa(ticket: Ticket, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any,
              **kwargs: Any) -> Tensor:  # fmt: skip  # the signature of scaled_dot_product_attention
        # transformers packs the queries of a group as rows when there is one query and fewer KV heads
        packed = ticket.layer.fresh == 1 and query.shape[1] == key.shape[1] and query.shape[2] > 1
        heads = query.shape[1] * (query.shape[2] if packed else 1)
        if attn_mask is not None and packed and attn_mask.shape[2] > 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[0], heads, 1, attn_mask.shape[-1])
        exact = ticket.exact_mask(attn_mask, heads)
        if exact is not None and packed and exact.shape[1] == heads:
            exact = exact.reshape(exact.shape[0], key.shape[1], -1, exact.shape[-1])
        if exact is not None and attn_mask is None and kwargs.get("is_causal"):
            kwargs["is_causal"] = False
        key = key.as_subclass(torch.Tensor)  # a plain tensor for compilers
        result = F.scaled_dot_product_attention(query, key, value, exact, *rest, **kwargs)
        ticket.finish()
        return result


# -- installed on one model ------------------------------------------------------------------------------------

_PREFIX = "kvevict_"
_attached: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


class Attachment:
    """What was installed on one model, and for which caches."""

    def __init__(self, model: nn.Module) -> None:
        self.base = host.implementation(model)
        self.active = True
        self.users: weakref.WeakSet[EvictingCache] = weakref.WeakSet()
        self.handles: list[RemovableHandle] = []
        self.configs: list[tuple[weakref.ref[nn.Module], PreTrainedConfig]] = []
        modules = host.attention_modules(model)
        if self.base == "eager":
            for module in modules:
                self.handles.append(module.register_forward_pre_hook(_Hook(_before_eager), with_kwargs=True))
                self.handles.append(module.register_forward_hook(_Hook(_after_eager), with_kwargs=True))
            return
        name = _PREFIX + self.base
        self.attention = _observed(self.base)
        AttentionInterface.register(name, _traced(self.base, self.attention))
        views: dict[int, PreTrainedConfig] = {}
        for module in modules:
            config = module.config
            assert isinstance(config, PreTrainedConfig)
            view = views.setdefault(id(config), _config_view(config, self.base, name))
            self.configs.append((weakref.ref(module), config))
            module.config = view  # type: ignore[assignment]  # nn.Module types every attribute as Tensor | Module

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return self  # a copied cache is observed through the same installation

    def remove(self) -> None:
        """Puts the model back."""
        self.active = False
        for handle in self.handles:
            handle.remove()
        for reference, config in self.configs:
            module = reference()
            if module is not None:
                module.config = config  # type: ignore[assignment]  # as above
        self.handles, self.configs = [], []


def attach(model: nn.Module, cache: EvictingCache) -> Attachment:
    """Prepares ``model`` so that ``cache`` sees its attention. Models prepared before are not prepared twice."""
    with _lock:
        attachment = _attached.get(model)
        if attachment is not None and attachment.base != host.implementation(model):
            attachment.remove()
            attachment = None
        if attachment is None:
            attachment = _attached[model] = Attachment(model)
        attachment.users.add(cache)
        return attachment


def detach(model: nn.Module) -> None:
    """Puts ``model`` back exactly as it was before any cache was built for it.

    Caches that need its attention raise when they are used again. A model that was never prepared is left alone.
    """
    with _lock:
        attachment = _attached.pop(host.unwrapped(model), None)
        if attachment is not None:
            attachment.remove()


def release(model: nn.Module, cache: EvictingCache) -> None:
    """Ends one cache's use of ``model``; the last one to leave detaches it."""
    with _lock:
        attachment = _attached.get(model)
        if attachment is None:
            return
        attachment.users.discard(cache)
        if not attachment.users:
            detach(model)


def _config_view(config: PreTrainedConfig, base: str, name: str) -> PreTrainedConfig:
    """A live view of ``config`` that names our attention function while the model still runs ``base``.

    It shares the config's attributes both ways. Writing the name into the config itself would reach every other
    model that was built from the same config object.
    """
    kind = type(config)

    def get(self: PreTrainedConfig) -> str | None:
        current: str | None = self._attn_implementation_internal
        return name if current == base else current

    def equal(self: PreTrainedConfig, other: object) -> bool:
        return getattr(other, "__dict__", None) is config.__dict__ or bool(config == other)

    view_type = type(
        kind.__name__,
        (kind,),
        {
            "_attn_implementation": property(get, vars(PreTrainedConfig)["_attn_implementation"].fset),
            "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs),  # transformers makes new ones to compare
            "__deepcopy__": lambda self, memo: copy.deepcopy(config, memo),
            "__reduce_ex__": lambda self, protocol: (operator.itemgetter(0), ((config,),)),
            "__eq__": equal,
            "__hash__": kind.__hash__,
            "__module__": kind.__module__,
        },
    )
    view: PreTrainedConfig = object.__new__(view_type)
    object.__setattr__(view, "__dict__", config.__dict__)
    return view


_TAG = "_kvevict_ticket"


def tag(keys: Tensor, ticket: Ticket | compiled.Deferred) -> Tensor:
    """Marks a fresh view of the keys, so that the attention that receives it finds its cache."""
    setattr(keys, _TAG, ticket)
    return keys


def _traced(base: str, attention: AttentionFunction) -> AttentionFunction:
    """``attention``, and what ``torch.compile`` makes of it."""

    def call(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        mark: Ticket | compiled.Deferred | None = getattr(key, _TAG, None)
        if isinstance(mark, compiled.Deferred):
            mark.check(module, value)
            whole = torch.compiler.is_compiling() and not torch.is_grad_enabled()
            whole = whole and host.is_plain(host.attention_function(base, module), query, kwargs)
            run = mark.in_graph if whole else mark.apart
            return run(query, attention_mask, kwargs), None
        if mark is None and torch.compiler.is_compiling():
            return host.attention_function(base, module)(module, query, key, value, attention_mask, **kwargs)
        return attention(module, query, key, value, attention_mask, **kwargs)

    return call


def _observed(base: str) -> AttentionFunction:
    """An attention function that runs ``base`` and shows evicting caches what it attended."""

    from kvevict.cache import EvictingCache as evicting

    @uncompiled
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        ticket: Ticket | None = getattr(key, _TAG, None)
        kernel = host.attention_function(base, module)
        if ticket is None:
            if isinstance(kwargs.get("cache"), evicting):
                _ignored("cache")
            return kernel(module, query, key, value, attention_mask, **kwargs)
        scaling = kwargs.get("scaling")
        steady = ticket.layer.steady
        alone = attention_mask is None and query.shape[2] == 1
        if steady is not None and alone and not torch.is_grad_enabled() and host.is_plain(kernel, query, kwargs):
            if isinstance(steady, Member):
                output = steady.attend(query, scaling)
            else:
                output, weights = attend(query, key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1), scaling)
                steady.observe(ticket.layer, [(0, weights.view(*key.shape[:2], -1, 1, key.shape[2]))])
            ticket.cache.settle(ticket.layer)
            return output, None

        def rows(start: int, stop: int, slots: int, last: int, mask: Tensor | None) -> Iterable[tuple[int, Tensor]]:
            whole = stop - start == query.shape[2] and slots == key.shape[2]
            asked, held = (query.detach(), key.detach()) if query.requires_grad or key.requires_grad else (query, key)
            return attention_rows(
                asked if whole else asked[:, :, start:stop],
                held if whole else held[:, :, :slots],
                mask,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                last=last,
                softcap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux"),
            )

        exact = ticket.exact_mask(attention_mask, query.shape[1], rows)
        told = None if ticket.layer.plain else exact  # rows without a mask are causal, and only computed as far
        fused = ticket.cache.fused_prefill and ticket.layer.wanted == query.shape[2] > 1
        if (
            fused
            and ticket.layer.draft is None
            and not torch.is_grad_enabled()
            and host.is_plain(kernel, query, kwargs)
        ):
            B, heads, tokens, D = query.shape
            output = query.new_empty(B, tokens, heads, value.shape[-1])
            scale = D**-0.5 if scaling is None else scaling
            ticket.finish(attention_rows(query, key, told, scaling=scale, last=tokens, values=value, output=output))
            return output, None
        if exact is not None and exact.dim() == 4 and not host.takes_matrix_masks(base):
            kernel = host.masked_attention(module, kwargs)  # flash kernels take no mask per head
        result = kernel(module, query, key, value, exact, **kwargs)
        if not ticket.layer.wanted or ticket.layer.draft is not None:
            ticket.finish()
            return result
        seen = told
        if seen is not None and seen.dim() == 2:
            seen = ticket.layer.causal_mask(query.shape[1])
        with torch.no_grad():
            ticket.finish(rows(0, query.shape[2], key.shape[2], ticket.layer.wanted, seen))
        return result

    return attention


class _Hook:
    """A hook of one model. A copy or pickle of the model gets one that does nothing, and needs no kvevict to load."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @uncompiled
    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, returns None


def _ignored(name: str) -> NoReturn:
    """Before 5.23, transformers takes the argument ``cache`` for something unknown and passes it on unused."""
    raise ObservationError(
        f"this release of transformers ignores the argument {name!r}: pass the cache as past_key_values={name}"
    )


def _eager_layer(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The evicting cache and layer that this call of an attention module will update, or None."""
    from kvevict.cache import EvictingCache
    from kvevict.layer import EvictingLayer

    found = host.find_cache(kwargs)
    if found is None or not isinstance(found[1], EvictingCache):
        return None
    name, cache = found[0], found[1]
    if name not in host.parameters(type(module).forward):
        _ignored(name)
    cache.check_module(module)
    layer = cache.layers[module.layer_idx]  # type: ignore[index]  # nn.Module types attributes as Tensor | Module
    return (cache, layer) if isinstance(layer, EvictingLayer) and not cache.free else None


def _before_eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _eager_layer(module, kwargs)
    if found is None:
        return None
    cache, layer = found
    hidden = args[0] if args else kwargs["hidden_states"]
    if layer.index == 0:
        cache.check_forward(module, hidden.shape[1], host.unused(kwargs))
    layer.check(hidden.shape[0], hidden.shape[1])
    layer.hooked = True
    mask = kwargs.get("attention_mask")
    if layer.slots:  # otherwise everything is new, and transformers' mask is exact
        layer.reserve(hidden.shape[1])
        mask = layer.exact_mask(mask, _query_heads(module, cache, layer))
    if mask is not None:
        mask = masks.additive(mask, hidden.dtype)
    return args, {**kwargs, "attention_mask": mask}


def _after_eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    found = _eager_layer(module, kwargs)
    if found is None or not found[1].pending:
        return
    cache, layer = found
    mask, heads = kwargs.get("attention_mask"), _query_heads(module, cache, layer)
    if layer.slots == layer.fresh:
        mask = layer.exact_mask(mask, heads)  # learns the prompt's padding
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(weights, Tensor) or weights.dim() != 4:
        raise WrongModelError(
            f"{type(module).__name__} returned no attention weights: kvevict cannot observe it with eager attention; "
            "try model.set_attn_implementation('sdpa') before building the cache"
        )
    seen = weights.detach()
    if layer.draft is not None:
        drafts.rehearse(layer, mask, heads, functools.partial(_eager_draft_rows, seen, layer.kv_heads))
    Ticket(cache, layer).finish(_eager_rows(layer, seen))


def _query_heads(module: nn.Module, cache: EvictingCache, layer: EvictingLayer) -> int:
    """Query heads of this layer: some families have more of them in some layers than in others."""
    groups = getattr(module, "num_key_value_groups", None)
    return layer.kv_heads * int(groups) if isinstance(groups, int) else cache.heads


def _eager_rows(layer: EvictingLayer, weights: Tensor) -> Iterable[tuple[int, Tensor]]:
    """The last rows that the policy wants, of weights (B, heads, Q, slots)."""
    first = layer.fresh - layer.wanted
    if layer.wanted:
        yield first, weights[:, :, first:].float().unflatten(1, (layer.kv_heads, -1))  # (B, H, G, q, slots)


def _eager_draft_rows(
    weights: Tensor, kv_heads: int, start: int, stop: int, slots: int, last: int, mask: Tensor | None
) -> Iterable[tuple[int, Tensor]]:
    """Rows of a draft that evicts nothing before its last token, so that what eager attention saw is right."""
    first = stop - last
    yield first - start, weights[:, :, first:stop, :slots].float().unflatten(1, (kv_heads, -1))
