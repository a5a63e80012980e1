"""Times kvpress's decode presses, in an environment that has kvpress and need not have kvevict.

    python -I kvpress_process.py REQUEST.json ANSWER.json

Imports nothing of kvevict. A line "tick SHARE" on stdout tells which share is done.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.metadata
import json
import random
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

CHUNK = 512
WARM_UP = 3
BASE = "DynamicCache"
PRESSES = {
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "random": "RandomPress",
    "snapkv": "SnapKVPress",
    "streaming_llm": "StreamingLLMPress",
    "tova": "TOVAPress",
}


@torch.no_grad()
def forward(model: Any, cache: Any, ids: Any) -> None:
    """One forward of ``ids`` (1, Q)."""
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def timed(model: Any, cache: Any, ids: Any) -> float:
    """Seconds of one forward."""
    wait(ids)
    begin = time.perf_counter()
    forward(model, cache, ids)
    wait(ids)
    return time.perf_counter() - begin


def wait(ids: Any) -> None:
    """Until the accelerator has nothing left to do."""
    if ids.device.type != "cpu":
        torch.accelerator.synchronize(ids.device)


def make_press(kvpress: Any, name: str, budget: int) -> Any:
    """A decode press that cuts to the budget after every token, as kvevict does."""
    scorer = getattr(kvpress, PRESSES[name])()
    return kvpress.DecodingPress(base_press=scorer, compression_interval=1, target_size=budget)


def step(model: Any, press: Any, cache: Any, ids: Any) -> float:
    """Seconds of one step; the press's hooks are put on and taken off outside of them."""
    if press is None:
        return timed(model, cache, ids)
    with press(model):
        return timed(model, cache, ids)


def measure(model: Any, kvpress: Any, request: dict[str, Any], section: str, at: int, budget: int) -> dict[str, Any]:
    """Rows and failures of one section: ``at`` tokens seen, ``budget`` of them kept."""
    steps = int(request["steps"]) + WARM_UP
    ids = torch.tensor(request["ids"]).to(model.device)
    filled = DynamicCache()
    for block in ids[:, :at].split(CHUNK, 1):
        forward(model, filled, block)
    presses: dict[str, Any] = {BASE: None}
    failures: dict[str, str] = {}
    for name in request["presses"]:
        try:
            presses[name] = make_press(kvpress, name, budget)
        except Exception as error:  # not every release has every press
            failures[name] = f"{type(error).__name__}: {error}"
    caches = {name: copy.deepcopy(filled) for name in presses}
    seconds: dict[str, list[float]] = {name: [] for name in presses}
    gc.collect()
    gc.disable()
    for number in range(steps):
        token = ids[:, number : number + 1]
        for name in random.Random(number).sample(list(seconds), len(seconds)):
            try:
                elapsed = step(model, presses[name], caches[name], token)
            except Exception as error:  # whatever a press raises is its result
                failures[name] = f"{type(error).__name__}: {error}"
                del seconds[name]
                continue
            if number >= WARM_UP:
                seconds[name].append(elapsed)
            if name == BASE:
                rewind(caches[name], at)
        print("tick", 1 / steps / len(request["sections"]), flush=True)
    gc.enable()
    rows = [
        {"section": section, "name": name, "at": at, "held": held(caches[name]), "seconds": times,
         "nbytes": nbytes(caches[name])}
        for name, times in seconds.items()
    ]  # fmt: skip  # one row, two lines
    return {"rows": rows, "failures": failures}


def rewind(cache: Any, tokens: int) -> None:
    """The cache as it was before the step; ``crop`` takes other arguments in other releases of transformers."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]


def held(cache: Any) -> int:
    """Tokens per KV head in the fullest layer."""
    return max(int(layer.keys.shape[-2]) for layer in cache.layers)


def nbytes(cache: Any) -> int:
    """Bytes of the storages behind keys and values."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def main(request_file: str, answer_file: str) -> None:
    """Reads the request, measures, and writes the answer."""
    with open(request_file, encoding="utf-8") as stream:
        request = json.load(stream)
    kvpress = importlib.import_module("kvpress")
    torch.set_num_threads(request["threads"])
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype, attn_implementation="sdpa")
    model.to(request["device"]).eval()
    answer: dict[str, Any] = {
        "versions": {
            "kvpress": importlib.metadata.version("kvpress"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "rows": [],
        "failures": {},
    }
    for section, at, budget in request["sections"]:
        found = measure(model, kvpress, request, section, at, budget)
        answer["rows"] += found["rows"]
        answer["failures"] |= found["failures"]
    with open(answer_file, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
