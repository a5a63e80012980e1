"""Tiny random models, ragged batches and small readings that the contract tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvevict import EvictingCache, host
from kvevict.policies import POLICIES, Policy, make_policy

NAMES = list(POLICIES)
SMALL: dict[str, dict[str, Any]] = {
    # the defaults of these protect or remember more tokens than the tests have
    "scissorhands": {"recent": 2, "window": 12},
    "snapkv": {"window": 3, "kernel": 3},
    "pyramidkv": {"window": 3, "kernel": 3},
}
FREE = [name for name in NAMES if not POLICIES[name](**SMALL.get(name, {})).queries]
OBSERVING = [name for name in NAMES if name not in FREE]
IMPLEMENTATIONS = ["sdpa", "eager"]

LAYERS, HEADS, KV_HEADS, VOCABULARY = 3, 4, 2, 97
LENGTHS = (20, 13, 5)
"""Real tokens of each row of the ragged batch; the longest fills its prompt of 20 columns."""
PROMPT = max(LENGTHS)
BLOCKS = (20, 1, 1, 1, 6, 1, 1, 3, 1, 1)
"""Tokens of each forward: a prompt, decode steps, and turns of several tokens after evictions."""
BUDGET = 9

NOISE = 2e-5
"""float32: logits are of size 10; sums of up to 40 terms in another order move them by a few units of 1e-6. Attending
one wrong token moves them by more than 0.1 (test_the_reference_can_fail)."""


every_policy = pytest.mark.parametrize("name", NAMES)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
alone_and_padded = pytest.mark.parametrize("padded", [False, True], ids=["alone", "padded"])


def small(name: str, **options: Any) -> Policy:
    """The policy of that name with options that fit a budget of nine tokens."""
    return make_policy(name, **{**SMALL.get(name, {}), **options})


def sharpened(model: Any) -> Any:
    """The model in evaluation mode with weights four times as large, so that attention is not flat."""
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def tiny(implementation: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A random Llama with grouped query heads; the same numbers for the same arguments."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
             "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY}  # fmt: skip  # one model, one line each
    config = LlamaConfig(**{**shape, **options})
    config._attn_implementation = implementation
    return sharpened(LlamaForCausalLM(config)).to(dtype)


def reader(vocabulary: int = 128, **options: Any) -> LlamaForCausalLM:
    """A random Llama of two layers for tests that measure how it reads; the same numbers every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    shape = {**sizes, **ends, "num_key_value_heads": 2, "vocab_size": vocabulary, **options}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after "<end>"."""
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save_reader(folder: Path) -> Path:
    """Saves ``reader()`` and ``byte_tokenizer()`` where commands can load them; returns the folder."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    reader(len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    return folder


def text(rows: int = 1, length: int = sum(BLOCKS), seed: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    """Random token ids (rows, length), each once in a row while they last: equal tokens have keys of equal length in
    the first layer, and only rounding would decide which of them goes."""
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-length // (vocabulary - 1))
    drawn = [torch.rand(rows, vocabulary - 1, generator=generator).argsort(1) + 1 for _ in range(rounds)]
    return torch.cat(drawn, 1)[:, :length] if drawn else torch.zeros(rows, 0, dtype=torch.long)


def ragged_mask(length: int = sum(BLOCKS), lengths: Sequence[int] = LENGTHS) -> Tensor:
    """(rows, length): zeros for the left pads of the prompt, ones for everything after."""
    mask = torch.ones(len(lengths), length, dtype=torch.long)
    for row, real in enumerate(lengths):
        mask[row, : max(lengths) - real] = 0
    return mask


def batch(padded: bool, length: int = sum(BLOCKS)) -> tuple[Tensor, Tensor | None]:
    """Token ids and mask: the ragged batch of three rows, or its longest row alone."""
    ids = text(len(LENGTHS), length)
    return (ids, ragged_mask(length)) if padded else (ids[:1], None)


def blocks_of(ids: Tensor, sizes: Sequence[int] = BLOCKS) -> list[Tensor]:
    """The ids cut into forwards."""
    return list(ids.split(list(sizes), 1))


def forward(model: Any, cache: Any, block: Tensor, mask: Tensor | None = None, positions: bool = False) -> Tensor:
    """The logits of one forward, with the cache under the name that this release calls it by."""
    arguments: dict[str, Any] = {host.cache_argument(model): cache, "use_cache": True}
    if mask is not None:
        arguments["attention_mask"] = mask
    if positions:
        seen = cache.get_seq_length()
        if mask is None:
            arguments["position_ids"] = torch.arange(seen, seen + block.shape[1])[None].expand(block.shape[0], -1)
        else:
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -block.shape[1] :]
    with torch.no_grad():
        return model(block, **arguments).logits


def loop(
    model: Any, cache: Any, blocks: Sequence[Tensor], mask: Tensor | None = None, positions: bool = False
) -> list[Tensor]:
    """Logits of a hand-written loop over forwards."""
    logits, done = [], 0
    for block in blocks:
        done += block.shape[1]
        logits.append(forward(model, cache, block, None if mask is None else mask[:, :done], positions))
    return logits


def generate(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, new: int = 8, **options: Any) -> Any:
    """Greedy generate() with logits, the cache under this release's name."""
    options.setdefault("return_dict_in_generate", True)
    options.setdefault("output_logits", True)
    options.setdefault("do_sample", False)
    if mask is not None:
        options["attention_mask"] = mask
    return model.generate(ids, max_new_tokens=new, **{host.cache_argument(model): cache}, **options)


RENAMED = host.cache_argument(tiny()) == "cache"
"""Whether this release of transformers calls the argument `cache` (5.23 on)."""


def deprecated_name() -> contextlib.AbstractContextManager[Any]:
    """Where `past_key_values` is the old name of `cache`, using it must warn, and nothing else may."""
    return pytest.warns(FutureWarning, match="past_key_values") if RENAMED else contextlib.nullcontext()


def plain(model: Any) -> DynamicCache:
    """The cache that keeps everything."""
    return DynamicCache(config=model.config)


def kept(cache: EvictingCache) -> list[Tensor]:
    """Kept positions of every evicting layer."""
    return [layer.kept_positions() for layer in cache.evicting_layers]


def by_position(cache: EvictingCache) -> list[dict[str, Tensor]]:
    """The policy's columns of every evicting layer, ordered by position, with empty slots out of the way."""
    read = []
    for layer in cache.evicting_layers:
        positions = layer.slot_positions
        last = torch.iinfo(positions.dtype).max
        order = positions.masked_fill(positions < 0, last).argsort(-1)[:, :, : layer.kept_positions().shape[-1]]
        empty = positions.gather(2, order) < 0
        columns = {}
        for name, column in layer.state.items():
            wide = order.view(*order.shape, *(1,) * (column.dim() - 3)).expand(*order.shape, *column.shape[3:])
            values = column.gather(2, wide)
            if name == "votes":
                values = values[..., :-1]  # SnapKV's last place takes what queries without a vote would write
            columns[name] = values.masked_fill(empty.view(*empty.shape, *(1,) * (values.dim() - 3)), 0)
        read.append(columns)
    return read


def real(mask: Tensor | None, block: Tensor, done: int) -> Tensor:
    """Which tokens of the block that ends at column ``done`` are not pads: (B, Q) bool."""
    if mask is None:
        return torch.ones_like(block, dtype=torch.bool)
    return mask[:, done - block.shape[1] : done].bool()


def largest_error(
    got: Sequence[Tensor], expected: Sequence[Tensor], blocks: Sequence[Tensor], mask: Tensor | None = None
) -> float:
    """Largest difference of two runs' logits over real tokens; NaN counts as infinite."""
    worst, done = 0.0, 0
    for one, other, block in zip(got, expected, blocks, strict=True):
        done += block.shape[1]
        error = (one.float() - other.float()).abs()[real(mask, block, done)].nan_to_num(nan=float("inf"))
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    return worst


def snapshot(model: nn.Module) -> list[Any]:
    """Everything about a model that preparing it could change, by identity where that matters."""

    def freeze(value: Any) -> Any:
        if isinstance(value, dict):
            return id(value), [(key, id(held)) for key, held in value.items()]
        return id(value)

    modules = [
        (name, type(module), {key: freeze(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    ]
    configs = [(id(c), type(c), c._attn_implementation, repr(c)) for c in _configs(model)]
    return [modules, configs]


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if "config" in vars(module):
            yield module.config


def registries() -> list[dict[str, Any]]:
    """transformers' tables of attention and mask functions."""
    return [dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)]
