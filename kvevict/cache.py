"""EvictingCache: a transformers cache that never holds more than its budget."""

from __future__ import annotations

import copy
import math
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvevict import compiled, drafts, eviction, host, observe, storage
from kvevict.checks import check_budget, check_fused, check_model, check_protection
from kvevict.errors import (
    ObservationError,
    OptionError,
    UnsupportedModelError,
    UnsupportedOperationError,
    WrongModelError,
)
from kvevict.inference import outside_inference_mode
from kvevict.layer import EvictingLayer
from kvevict.offloaded import OffloadedLayer
from kvevict.policies import make_policy
from kvevict.policies.base import Policy
from kvevict.quantized import Quantized, QuantizedLayer, storage_of
from kvevict.rope import rerotation_for
from kvevict.spec import Spec
from kvevict.steady import Alone, Choir, Member, gather


class EvictingCache(Cache):
    """A KV cache that forgets: after every forward each KV head of each full-attention layer holds its budget.

    model:  the causal language model that will use the cache.
    policy: a name (``kvevict.policies.POLICIES``), or an instance of a policy, yours included.
    budget: tokens per KV head in each layer (int), or a share of the tokens seen (float in (0, 1]): that many,
        rounded down, and never fewer than the policy protects.
    fused_prefill: compute attention and what the policy reads of it in one pass over a prompt, which saves time on long
        prompts. The output then equals sdpa's but for rounding. For policies that read every query, on sdpa.
    storage: how keys and values are kept between forwards: None as they are, "quanto4", "quanto2", or a
        ``kvevict.Quantized`` for packed ones.
    offloading: whether evicting layers keep keys and values on the CPU while they are not attended to.
    options: the policy's options when ``policy`` is a name, such as ``recent=64``.

    The new tokens attend to everything held plus themselves; then the policy decides who goes. A prompt is
    attended in full and cut once. ``get_seq_length()`` counts the tokens seen, ``kept_positions(layer)`` tells
    which are still held, and ``nbytes`` what they cost.

    Raises OptionError for a bad policy, option or budget, and UnsupportedModelError for a model whose attention
    cannot be observed or whose cache cannot be cut.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import torch
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                      num_key_value_heads=2, vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config)
    >>> cache = EvictingCache(model, policy="streaming_llm", budget=8)
    >>> out = model.generate(torch.arange(20)[None], cache=cache, max_new_tokens=4, do_sample=False)
    >>> cache.kept_positions(0)[0, 0].tolist()
    [0, 1, 2, 3, 19, 20, 21, 22]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "h2o",
        budget: int | float = 512,
        *,
        fused_prefill: bool = False,
        storage: Quantized | str | None = None,
        offloading: bool = False,
        **options: Any,
    ) -> None:
        chosen = make_policy(policy, **options)
        tokens = check_budget(budget)
        how = storage_of(storage)
        if not isinstance(offloading, bool):
            raise OptionError(f"offloading={offloading!r}: expected True or False")
        if how is not None and offloading:
            raise OptionError("storage= and offloading=True: packed tokens stay on their device. Leave out one of them")
        given, model = model, host.unwrapped(model)
        config = check_model(model)
        if how is not None:
            how.check_head(host.head_size(config))
        layers = host.host_layers(config)
        evicting = [i for i, layer in enumerate(layers) if host.is_full_attention(layer)]
        if not evicting:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no layer that keeps the keys and values of every token: there is nothing "
                "to evict. Use transformers' own cache"
            )
        check_fused(fused_prefill, chosen, model)
        spec = Spec(chosen, tokens, len(evicting))
        check_protection(spec)
        if getattr(chosen, "positions", "original") == "cache":
            spec.rerotation = rerotation_for(model)
        for index, position in enumerate(evicting):
            layers[position] = _new_layer(spec, index, how, offloading)
        self._others = {i: copy.deepcopy(layer) for i, layer in enumerate(layers) if i not in evicting}
        super().__init__(layers=layers)
        self.spec, self.storage, self.offloads, self.fused_prefill = spec, how, offloading, fused_prefill
        self.heads = int(config.num_attention_heads)
        self._evicting = evicting
        self._assisted = False  # generate() turned past recording on
        self._choirs: list[Choir] = []  # layers that decide together while they decode
        self._print: dict[str, Any] | None = None  # of the model, where it was unpickled without one
        # Phi-3 and its kin: generate() drops the cache when the text outgrows this
        self._dropped_beyond: int | None = getattr(model.config, "original_max_position_embeddings", None)
        self._bind(model, host.is_compiled(given))

    def _bind(self, model: PreTrainedModel, is_compiled: bool) -> None:
        policy, self._print = self.policy, None
        self._model: Callable[[], torch.nn.Module | None] = weakref.ref(model)
        modules = host.attention_modules(model)
        self._modules = {id(module) for module in modules}
        self._by_layer = {int(str(module.layer_idx)): weakref.ref(module) for module in modules}
        self._base = host.implementation(model)
        blind = policy.queries == 0 and not policy.consensus
        self.free = blind and (self._base == "eager" or (self._base == "sdpa" and not is_compiled))
        self.attachment = None if self.free else observe.attach(model, self)
        self.spec.no_drafts = drafts.reason_against(self.spec, self.free, self._base)
        self.number = compiled.enrol(self)
        self.awaited: int | None = None  # the layer whose update was traced, until its attention is
        self._last = max(self._by_layer)
        self._traced = self._run = 2  # forwards, and those of them that ran; a compiler takes 0 and 1 for constants

    # -- what users ask --------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy that decides."""
        return self.spec.policy

    @property
    def budget(self) -> int | float:
        """Tokens per KV head and layer, or the share of tokens seen, as given."""
        return self.spec.budget

    @property
    def evicting_layers(self) -> list[EvictingLayer]:
        """The layers this cache bounds; the others are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, EvictingLayer)]

    @property
    @observe.uncompiled
    def stored(self) -> list[int]:
        """Tokens stored per KV head, for each evicting layer: the most that any row and head holds."""
        return [layer.stored for layer in self.evicting_layers]

    @property
    @observe.uncompiled
    def nbytes(self) -> int:
        """Bytes really held: every storage behind the cache counts once, whole, slack and bookkeeping included."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for layer in self.layers
            for tensor in _tensors(layer)
        }
        return sum(storages.values())

    @observe.uncompiled
    def kept_positions(self, layer_idx: int) -> Tensor:
        """Positions of the tokens that a layer still holds: (B, H, L) int64, ascending.

        0 is the row's first real token; -1 fills the end of rows that hold fewer. ``layer_idx`` is the model's.
        """
        layer = self.layers[self._layer_index(layer_idx)]
        if not isinstance(layer, EvictingLayer):
            raise OptionError(
                f"kept_positions({layer_idx}): layer {layer_idx} is a {type(layer).__name__} of transformers; the "
                f"layers that evict are {self._evicting}"
            )
        return layer.kept_positions()

    def _layer_index(self, layer_idx: int) -> int:
        if not -len(self.layers) <= layer_idx < len(self.layers):
            raise OptionError(f"kept_positions({layer_idx}): the model has layers 0 to {len(self.layers) - 1}")
        return layer_idx

    def __repr__(self) -> str:
        held = self.stored
        low, high = min(held), max(held)
        stored = str(high) if low == high else f"{low} to {high}"
        storage = "" if self.storage is None else f", storage={self.storage.backend}{self.storage.nbits}"
        return (
            f"EvictingCache(policy={self.policy.name or type(self.policy).__name__!r}, budget={self.budget}{storage}, "
            f"seen={self.get_seq_length(self._evicting[0])}, stored={stored} tokens per KV head in "
            f"{len(held)} of {len(self.layers)} layers, {human_bytes(self.nbytes)} held)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        self._check_halfway()
        self._catch_up()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            setattr(copied, name, [] if name == "_choirs" else copy.deepcopy(value, memo))
        copied.number = compiled.enrol(copied)
        if copied._drafting:
            copied._cut(0)  # its rows live in the original, which may go on
        if self.attachment is not None:
            self.attachment.users.add(copied)  # leaving a `with` of the original must not detach the copy
        return copied

    def __enter__(self) -> EvictingCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        model = self._model()
        if model is not None:
            observe.release(model, self)

    # -- copies and files ------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Brings all books up to date, as layers that decide together share tensors."""
        for layer in self.evicting_layers:
            layer.catch_up()

    def __copy__(self) -> EvictingCache:
        raise UnsupportedOperationError("copy.copy(cache) would share tensors that change: use copy.deepcopy(cache)")

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: everything but the model."""
        self._check_halfway()
        self._catch_up()
        model = self._model()
        known = self._print if model is None else storage.fingerprint(model)
        nobody = {"_model": _nobody, "_modules": set(), "_by_layer": {}, "attachment": None}
        own = {"_choirs": [], "_print": known, **nobody}
        return {**vars(copy.deepcopy(self) if self._drafting else self), **own}

    def attach(self, model: PreTrainedModel) -> EvictingCache:
        """Lets ``model`` use a cache that was unpickled, or whose model was detached; returns the cache.

        Raises WrongModelError, before anything changes, for a model other than the one that filled the cache, or if
        that model is gone and nothing tells which it was.
        """
        given, model = model, host.unwrapped(model)
        known = self._model()
        if self._print is not None:
            storage.check_model(self._print, storage.fingerprint(model), "this cache")
        elif known is None:
            raise WrongModelError(
                "the model that filled this cache is gone, and so it cannot be told whether this one is the same: save "
                "or pickle a cache while its model is there"
            )
        elif known is not model:
            raise WrongModelError("this cache belongs to another model: build an EvictingCache for this one")
        check_fused(self.fused_prefill, self.policy, model)
        self._bind(model, host.is_compiled(given))
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a folder: cache.safetensors and cache.json.

        Raises OutputError if they cannot be written, and ObservationError if the last forward ended halfway.
        """
        self._check_halfway()
        model = self._model()
        if model is None:
            raise ObservationError("this cache belongs to no model: call cache.attach(model) before saving it")
        layers = copy.deepcopy(self).layers if self._drafting else self.layers
        states = [layer.books() if isinstance(layer, EvictingLayer) else vars(layer) for layer in layers]
        storage.save(self.policy, self.budget, states, model, Path(path))

    @classmethod
    def load(
        cls,
        model: PreTrainedModel,
        path: str | os.PathLike[str],
        policy: Policy | None = None,
        *,
        offloading: bool = False,
        fused_prefill: bool = False,
    ) -> EvictingCache:
        """The cache that ``save`` wrote to a folder, for the same model; it continues where the saved one stood.

        policy: needed for a policy that is not registered: an instance with the options it had.
        offloading, fused_prefill: as for a new cache; they are not saved.
        Raises StoredCacheError for files that cannot be read, and WrongModelError for another model's.
        """
        policy, budget, states = storage.read(Path(path), host.unwrapped(model), policy)
        options = next((state["storage"] for state in states if "storage" in state), None)
        packed = None if options is None else Quantized(**options)
        cache = cls(model, policy, budget, storage=packed, offloading=offloading, fused_prefill=fused_prefill)
        for layer, state in zip(cache.layers, states, strict=True):
            if isinstance(layer, EvictingLayer):
                layer.restore(state)
            else:
                vars(layer).update(state)
        return cache

    # -- what transformers asks ------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, pads included, by one layer."""
        self._end_graph()
        seen = int(super().get_seq_length(layer_idx))
        limit = None if torch.compiler.is_compiling() else self._dropped_beyond  # generate() asks uncompiled
        if limit is not None and host.about_to_drop(limit, seen):
            raise UnsupportedOperationError(
                f"the text outgrows {limit} tokens, where this model changes its RoPE factors and "
                "generate() replaces the cache by a new one that evicts nothing. Keep prompt and new tokens below "
                "that length, or call the model in a loop of your own"
            )
        return seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of the mask for the next ``query_length`` tokens of one layer, and the first one's position."""
        self._end_graph()
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def _end_graph(self) -> None:
        """Ends the graph that is traced if it holds a forward already, which has to run before anything is asked."""
        if torch.compiler.is_compiling() and self._traced != self._run:
            self._catch_up_with_graphs()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not say what it returns
    def _catch_up_with_graphs(self) -> None:
        self._traced = self._run  # they differ here if a graph was interrupted by an error

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values (B, H, Q, D) of one layer; returns everything it holds.

        While ``torch.compile`` traces a forward, the attention that follows will do that: see ``kvevict.compiled``.
        """
        if not (torch.compiler.is_compiling() and compiled.can_defer(self)):
            return self._update(key_states, value_states, layer_idx, *args, **kwargs)
        self._check_awaited()
        self.awaited = layer_idx
        self._traced += layer_idx == self._last
        # nobody else's attention may take what it receives for keys
        deferred = compiled.Deferred(self, layer_idx, key_states, value_states)
        return observe.tag(torch.full_like(key_states, math.nan), deferred), value_states

    @observe.uncompiled  # slots are chosen by the state of the cache, and written in place
    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._check_awaited()
        if layer_idx >= len(self.layers):
            raise WrongModelError(
                f"layer {layer_idx} was updated in a cache built for {len(self.layers)} layers: build an EvictingCache "
                "for the model that uses it"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, EvictingLayer):
            first: Any = self.layers[self._evicting[0]]
            first.check_rows(key_states.shape[0])  # transformers' own layers find out when they are half changed
            held: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return held
        if layer.index == 0 and not layer.hooked:
            module, unused = host.calling_module(4)  # our frames: this one, `uncompiled`, `update`
            self.check_forward(module, key_states.shape[2], unused)
        hooked = layer.hooked
        keys, values = layer.update(key_states, value_states)
        maskless = self.free and layer.steady is not None and host.called_without_mask(4)
        if maskless and layer.steady is not None and layer.steady.unmasked:
            layer.settle()  # nobody looks at this attention, and it uses no mask: there is nothing to wait for
            return keys, values
        ticket = observe.Ticket(self, layer, maskless)
        if not self.free:
            if not hooked and self._base == "eager":
                raise WrongModelError("this cache was built for another model: build an EvictingCache for this one")
            return observe.tag(keys, ticket), values
        return observe.Probe.of(keys, ticket), values

    @property
    def base_now(self) -> str:
        """The model's attention implementation; what it was when this cache was built, if the model is gone."""
        model = self._model()
        return self._base if model is None else host.implementation(model)

    def _check_awaited(self) -> None:
        """Raises WrongModelError if an update that was traced met no attention of this cache's model."""
        if self.awaited is not None:
            raise WrongModelError(
                f"layer {self.awaited} of a compiled forward did not attend as this cache's model does: build an "
                "EvictingCache for the model that uses it, after the last change to its attention"
            )

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """``update`` with new keys and values (B, H, Q, D), then the attention of queries (B, heads, Q, D).

        Returns (B, Q, heads, D). For forwards that were compiled.
        """
        module = self._by_layer[layer_idx]()
        assert module is not None and self.attachment is not None
        self.awaited = None  # a graph that begins after the update writes it only when it ends
        keys, values = self._update(key, value, layer_idx)
        output, _ = self.attachment.attention(module, query, keys, values, mask, **options)
        self._run += layer_idx == self._last
        return output

    def check_forward(self, module: torch.nn.Module | None, tokens: int, unused: bool) -> None:
        """Once per forward of ``tokens`` tokens, before the first evicting layer stores them.

        Raises if ``module``, its attention or the layers are not as this cache needs them, or if generate() was asked
        for no cache (``unused``).
        """
        if not self._modules:
            raise ObservationError("this cache was unpickled and belongs to no model yet: call cache.attach(model)")
        self.check_module(module)
        if unused and host.generating_without_cache():
            raise OptionError(
                "use_cache=False with an EvictingCache: generate() would feed it the whole text again at every step. "
                "Leave out use_cache=False, or the cache"
            )
        self._check_halfway(tokens)
        self._end_draft()
        now = self.base_now
        if now != self._base:
            raise ObservationError(
                f"the model's attention implementation was {self._base!r} when this cache was built and is {now!r} "
                "now: set it back, or build a new EvictingCache"
            )
        if self.attachment is not None and not self.attachment.active:
            raise ObservationError(
                "the model was detached, so this cache can no longer see its attention: build a new EvictingCache"
            )

    # -- drafts ----------------------------------------------------------------------------------------------

    @observe.uncompiled
    def activate_past_recording(self) -> None:
        """From now on every forward is a draft until ``crop`` says how much of it stays: assisted decoding.

        The tokens of a draft see what they would see one by one, and leave what they would leave. A forward that
        follows without ``crop`` accepts the draft before it; ``reset`` ends the recording.

        Raises UnsupportedOperationError if generate() calls it for a cache that holds tokens: transformers would
        feed the whole text again.
        """
        if self.storage is not None:
            raise UnsupportedOperationError(
                "past recording (assisted and prompt-lookup decoding) with quantised storage: when a draft is packed, "
                "its tokens can no longer be taken back. Leave out storage=, or decode without a draft"
            )
        prompt = host.assisted_prompt()
        if prompt is not None and self.get_seq_length(self._evicting[0]):
            raise UnsupportedOperationError(
                "assisted decoding with a cache that already holds tokens: transformers feeds it the whole text a "
                "second time. Give a new cache, or decode without assistant_model and prompt_lookup_num_tokens"
            )
        self._assisted = prompt is not None
        super().activate_past_recording()  # type: ignore[no-untyped-call]  # transformers does not annotate it
        for layer in self.evicting_layers:
            layer.awaited = prompt

    @observe.uncompiled
    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest ``-tokens_to_remove`` tokens, then evicts; ``crop(0)`` accepts a draft whole.

        Raises ValueError for a number above 0, as transformers' own caches do, and UnsupportedOperationError, before
        anything changes, where the tokens did not come with a draft and something was evicted or observed since.
        """
        self._check_halfway()
        for evicting in self.evicting_layers:
            drafts.check_crop(evicting, -tokens_to_remove)
        for each in self.layers:
            if tokens_to_remove and not isinstance(each, EvictingLayer) and not host.can_crop(each):
                raise UnsupportedOperationError(
                    f"crop({tokens_to_remove}): a {type(each).__name__} of this model cannot take tokens back. Call "
                    "cache.activate_past_recording() before the forward, or go on from a copy.deepcopy(cache) made "
                    "before it"
                )
        if not self.get_seq_length(self._evicting[0]):
            return
        for other in self.layers:
            cut = tokens_to_remove or getattr(other, "record_past", False)  # a draft is accepted by cutting nothing
            if cut and not isinstance(other, EvictingLayer) and hasattr(other, "crop"):
                other.crop(tokens_to_remove)
        self._cut(-tokens_to_remove)

    def _cut(self, tokens: int) -> None:
        layers = [layer for layer in self.evicting_layers if layer.is_initialized]
        for layer in layers:
            drafts.cut(layer, tokens)
        for layer in layers:
            self.settle(layer)

    def _end_draft(self) -> None:
        """Accepts the newest forward if it is still a draft; stops recording once generate() is no longer there."""
        if not self.evicting_layers[0].record_past:
            return
        if self._drafting:
            self._cut(0)
        if self._assisted and host.assisted_prompt() is None:
            self._assisted = False
            begun = self.get_seq_length(self._evicting[0]) > 0
            recording: list[Any] = [layer for layer in self.layers if hasattr(layer, "record_past")]
            for layer in recording:
                if not isinstance(layer, EvictingLayer) and getattr(layer, "is_initialized", begun):
                    layer.crop(0)  # back to its window
                layer.record_past = False

    @property
    def _drafting(self) -> bool:
        return any(layer.draft is not None for layer in self.evicting_layers)

    def _check_halfway(self, ahead: int = 0) -> None:
        """Raises ObservationError if the previous forward ended halfway.

        ahead: tokens of the next forward that the layers below the first evicting one have taken already.
        """
        seen = [
            layer.get_seq_length() - (ahead if index < self._evicting[0] else 0)
            for index, layer in enumerate(self.layers)
            if isinstance(layer, CacheLayerMixin)
        ]
        if min(seen) != max(seen):
            raise ObservationError(
                f"the previous forward ended halfway: its layers have seen {min(seen)} to {max(seen)} tokens. Call "
                "cache.reset(), or go on from a copy made before it"
            )
        for layer in self.evicting_layers:
            layer.check_pending()

    @observe.uncompiled
    def reset(self) -> None:
        """Forgets everything, and frees the memory."""
        for layer in self.evicting_layers:
            layer.steady = None  # what a choir has heard so far is not settled any more
        for layer in self.evicting_layers:
            layer.reset()
        self._choirs, self.awaited, self._traced = [], None, self._run
        for index, unused in self._others.items():
            self.layers[index] = copy.deepcopy(unused)  # 5.17 only zeroes sliding layers

    @observe.uncompiled
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was, in every layer and in all that the policy knows."""
        self._before_rows("reorder_cache")
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # any integer tensor will do

    @observe.uncompiled
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times in a row."""
        self._before_rows("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    @observe.uncompiled
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these rows."""
        self._before_rows("batch_select_indices")
        super().batch_select_indices(indices)

    def _before_rows(self, operation: str) -> None:
        """Ends a draft, and raises before anything changes if some layer cannot do what the others would."""
        for layer in self.layers:
            if not hasattr(layer, operation):
                raise UnsupportedOperationError(
                    f"{operation}: a {type(layer).__name__} of this model has no such operation in this release of "
                    "transformers"
                )
        self._end_draft()

    def settle(self, layer: EvictingLayer) -> None:
        """Evicts after one layer's attention; policies with consensus wait for the last layer's vote."""
        steady = layer.steady
        if isinstance(steady, Member) and not steady.last:
            return  # the last one of its choir settles all of them
        last = layer.index == self.spec.layers - 1
        if not self.policy.consensus:
            layer.settle()
        elif last:
            self._settle_all(layer.crowded)
        if last and self.spec.stacks and any(isinstance(each.steady, Alone) for each in self.evicting_layers):
            self._choirs = [*filter(Choir.sings, self._choirs), *gather(self.evicting_layers)]

    @outside_inference_mode
    def _settle_all(self, crowded: bool) -> None:
        """Evicts from all layers what their votes decide."""
        layers = self.evicting_layers
        if self._choirs and all(isinstance(each.steady, Member) for each in layers):
            if not layers[-1].pending:
                return  # nothing came since
            total = sum(choir.votes() for choir in self._choirs)
            assert isinstance(total, Tensor)
            for choir in self._choirs:
                rows = choir.choice.held.positions.shape[0] // total.shape[0]
                choir.evict(-total.repeat(rows, 1)[:, None])
            return
        for choir in filter(Choir.sings, self._choirs):
            choir.dissolve()  # it knows only its own votes
        votes = eviction.votes(layers) if crowded else torch.empty(0)
        for each in layers:
            each.settle(lambda scores: -votes.to(scores.device)[:, None].expand_as(scores))

    def check_module(self, module: torch.nn.Module | None) -> None:
        """Raises WrongModelError if ``module`` is an attention module of another model."""
        if module is None or id(module) in self._modules or self._model() is None:
            return
        if hasattr(module, "layer_idx"):
            raise WrongModelError(
                "this cache was built for another model (or for another copy of this one): build an EvictingCache for "
                "the model that uses it"
            )


def _new_layer(spec: Spec, index: int, how: Quantized | None, offloading: bool) -> EvictingLayer:
    if how is not None:
        return QuantizedLayer(spec, index, how)
    return OffloadedLayer(spec, index) if offloading else EvictingLayer(spec, index)


def _nobody() -> None:
    """The model of a cache that was unpickled."""


def _tensors(layer: Any) -> Iterable[Tensor]:
    if isinstance(layer, EvictingLayer):
        return layer.tensors()
    return [value for value in vars(layer).values() if isinstance(value, Tensor)]


def human_bytes(size: float) -> str:
    """A size with its unit: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
