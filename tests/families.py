"""Every family of transformers' causal-LM mapping as a tiny random model, and what kvevict makes of it.

``python tests/families.py > docs/models.md`` writes the table that tests/test_families.py compares with what it finds.
"""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from helpers import sharpened
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvevict import EvictingCache, UnsupportedModelError, detach, host
from kvevict.layer import EvictingLayer

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TABLE = Path(__file__).parents[1] / "docs" / "models.md"
RELEASE = ".".join(transformers.__version__.split(".")[:2])


# -- tiny models ---------------------------------------------------------------------------------------------------

VOCABULARY = 128
"""Texts use ids up to 96; special tokens come after them, so that no text asks for an image."""

SIZES: list[tuple[str, int]] = [
    # (pattern of an attribute's name, its value in a tiny model); the first that matches counts
    (r"vocab", VOCABULARY),
    (r"^max_|positions$|^n_ctx$|max_length$|context_length$|max_seq", 512),
    (r"(^|_)layers?$", 2),
    (r"first_k_dense", 1),
    (r"n_groups?$|topk_group|expert_group|shared_experts$|query_groups|expand$", 1),
    (r"experts_per_tok|top_?k|moe_k$", 2),
    (r"experts?$|expert_num$|^num_blocks", 4),
    (r"(kv|key_value|key|value)_heads$", 2),
    (r"(heads|n_head|num_head)$", 4),
    (r"rope_head_dim|rotary_dim", 8),
    (r"head_?dim|head_size|d_head|dim_head|kv_channels", 16),
    (r"rank$|state|window|local_attention|chunk", 8),
    (r"intermediate|ffn|feed_forward|^d_inner|dff|dim_ff", 32),
    (
        r"hidden_size|d_model|n_embd|emb(edding|ed)?_dim|embedding_size|adapter_(in|out)|lru_width|proj_dim|classifier",
        64,
    ),
]
KEPT = r"conv|patch|channels$|image_size|_factor|floor|expansion|rate|seed|feed_forward_chunk|multipl|pattern|layer_idx"
"""Attributes that look like sizes and are not, or are small already."""

UNSET = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
"""Attributes that some configs leave unset although their models need them."""

LAYER_KINDS = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "block_types", "no_rope_layers")
"""Lists with one entry per layer; a tiny model has one layer of each kind."""

GEMMA3N = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 32,
           "activation_sparsity_pattern": [0.0] * 4,
           "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip  # one config
GEMMA4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
          "num_kv_shared_layers": 2}  # fmt: skip  # one config
QWEN4 = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
         "indexer_compress_ratio": 2}  # fmt: skip  # one config

OVERRIDES: dict[str, dict[str, Any]] = {
    # two layers of the default would be all linear: have one of each (zamba ties its second hybrid layer to the first)
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    # sliding everywhere by default, which many checkpoints switch off
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": None},
    # layers of different head counts are what this family is for
    "laguna": {"num_attention_heads_per_layer": [4, 2]},
    # what their configs check against one another
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": GEMMA3N,
    "gemma4_assistant": {"text_config": GEMMA4},
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["full_attention"] * 4,
    },
    "mllama": {
        "vision_config": {"max_num_tiles": 4},
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    },
    "reformer": {"axial_pos_shape": (16, 32), "axial_pos_embds_dim": (16, 48)},
    "xlnet": {"d_head": 16},
    # what their models need and their defaults lack
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "xmod": {"default_language": "en_XX"},
    # one stream of audio codes reads like text
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
}
VALID = {"gemma4_assistant": {"text_config": GEMMA4 | {"num_kv_shared_layers": 0}}}
"""For configs that their own defaults do not satisfy."""

NOT_BUILT = {"gemma3n": "its vision tower comes from the package timm; gemma3n_text has the same decoder"}
"""Families not tried, and why."""


def shrunk(name: str, value: Any) -> Any:
    """The value of a config's attribute in a tiny model, given an ordinary one."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"token_(id|index)$", name):
        return 0 if name == "pad_token_id" else VOCABULARY - 1 - sum(map(ord, name)) % 24
    if value <= 1 or re.search(KEPT, name):
        return value
    return next((size for pattern, size in SIZES if re.search(pattern, name)), value)


def tiny_config(kind: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    """A config of this class with two layers or more, one of each kind, and small sizes."""
    ordinary = {
        name: value
        for name, value in vars(kind(**copy.deepcopy(VALID.get(kind.model_type, {})))).items()
        if not name.startswith("_") and name not in ("id2label", "label2id")
    }
    counts = (ordinary.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers"))
    many = next((count for count in counts if isinstance(count, int)), 0)
    lists = [ordinary[name] for name in LAYER_KINDS if isinstance(ordinary.get(name), (list, tuple))]
    kinds = list(zip(*(each for each in lists if len(each) == many), strict=True))
    layers = sorted(kinds.index(each) for each in set(kinds))
    layers += [min(many, 2) - 1] * (2 - len(layers))
    arguments: dict[str, Any] = {"is_decoder": True} if "is_decoder" in ordinary else {}
    for name, value in ordinary.items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = tiny_config(type(value), overrides.get(name, {}))
        elif isinstance(value, (list, tuple)) and value and len(value) == many:
            arguments[name] = [shrunk(name, value[layer]) for layer in layers]
        elif name == "eos_token_id" and isinstance(value, list):
            arguments[name] = VOCABULARY - 1
        elif re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", name):
            arguments[name] = len(layers)
        elif value is None and name in UNSET:
            arguments[name] = UNSET[name]
        elif shrunk(name, value) != value:
            arguments[name] = shrunk(name, value)
    parts = [name for name, value in ordinary.items() if isinstance(value, PreTrainedConfig)]
    return kind(**{**arguments, **{name: value for name, value in overrides.items() if name not in parts}})


def build(family: str, **overrides: Any) -> Any:
    """A tiny random model of the family, with sharpened weights, in evaluation mode."""
    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[family], copy.deepcopy({**OVERRIDES.get(family, {}), **overrides}))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    own = [part for part in vars(config).values() if isinstance(part, kind.config_class)]
    model = sharpened(kind(own[0] if own and not isinstance(config, kind.config_class) else config))
    model.generation_config.decoder_start_token_id = 0  # MusicGen pads with it
    return model


@functools.lru_cache(maxsize=8)
def model_of(family: str) -> Any:
    """``build``, remembered while tests of one family follow one another."""
    return build(family)


# -- what kvevict makes of it --------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One family in the table."""

    outcome: str  # "supported", "refused" or "not built"
    remark: str


OTHER_RELEASES: dict[str, dict[str, Row]] = {
    "5.17": {
        **dict.fromkeys(["codegen", "gptj"], Row("refused", "does not use transformers' attention interface")),
        "cohere_compass_text": Row("not built", "its rotary embedding takes no layer types"),
        "gemma4_unified_assistant": Row("not built", "its config has no vocabulary"),
        **dict.fromkeys(["musicgen", "musicgen_melody"], Row("not built", "their configs have no defaults")),
    }
}
"""Where an older release differs from the table's: the outcome, and words of the message."""


def found(family: str) -> Row:
    """What happens when a cache is built for this family. Whether a supported one is right, the tests tell."""
    if family in NOT_BUILT:
        return Row("not built", NOT_BUILT[family])
    try:
        model = model_of(family)
    except Exception as error:  # configs and models raise whatever they like
        return Row("not built", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
    try:
        cache = EvictingCache(model, "h2o", budget=9)
    except UnsupportedModelError as error:
        return Row("refused", str(error))
    detach(model)
    return Row("supported", _remark(model, cache))


def _remark(model: Any, cache: EvictingCache) -> str:
    names = {"DynamicSlidingWindowLayer": "sliding-window or chunked", "LinearAttentionLayer": "linear or convolution",
             "DynamicIndexedLayer": "indexed", "DummyLayer": "feed-forward"}  # fmt: skip  # one table
    others = Counter(type(layer).__name__ for layer in cache.layers if not isinstance(layer, EvictingLayer))
    remarks = [f"{names.get(each, each)} layers stay transformers' own" for each in others]
    if host.implementation(model) == "eager":
        remarks.append("runs eager attention, having no sdpa")
    return "; ".join(remarks)


def table() -> str:
    """docs/models.md."""
    rows = {family: found(family) for family in FAMILIES}
    counts = Counter(row.outcome for row in rows.values())
    lines = [
        "# Models",
        "",
        f"What kvevict makes of every family in the causal-LM mapping of transformers {RELEASE}:",
        f"{counts['supported']} supported, {counts['refused']} refused when the cache is built, "
        f"{counts['not built']} not built by the test.",
        "",
        "Supported means, on a tiny random model: with room for everything, logits and tokens are those of",
        "`DynamicCache`; after evictions, logits equal full attention under a mask that hides the evicted tokens; no",
        "layer ever holds more than its budget; and no token sees a later one. Tried with single rows and left-padded",
        "batches of text, h2o and random. tests/families.py writes this table, and tests/test_families.py checks it.",
        "",
        "Images: LLaVA and Qwen2-VL, which the mapping does not have, pass the same tests with an image in the prompt,",
        "whose tokens are evicted like any others. Encoder-decoders are refused, and BART and its kin as soon as they",
        "are given an encoder's output.",
        "",
        "Learned positions end. Past the last one the model's own embedding raises IndexError (GPT-2, OPT and most",
        "others) or RuntimeError (BERT and its kin) before the cache is asked, which then holds what it held.",
        "",
        "| family | outcome | message or remark |",
        "|---|---|---|",
    ]
    lines += [f"| {family} | {row.outcome} | {written(family, row)} |" for family, row in rows.items()]
    return "\n".join([*lines, ""])


def written(family: str, row: Row) -> str:
    """The table's last column."""
    remarks = [row.remark] if row.remark else []
    for release, differing in OTHER_RELEASES.items():
        if family in differing:
            remarks.append(f"{release}: {differing[family].outcome}, {differing[family].remark}")
    return "; ".join(remarks)


def recorded() -> tuple[str, dict[str, Row]]:
    """The release and the rows that docs/models.md has."""
    text = TABLE.read_text(encoding="utf-8")
    release = re.search(r"mapping of transformers ([\d.]+):", text)
    assert release is not None
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("| ")]
    return release[1], {family: Row(outcome, remark) for family, outcome, remark in rows[1:]}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print(table(), end="")
