"""lm-evaluation-harness through an evicting cache."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import byte_tokenizer, generate, reader
from transformers import DynamicCache

from kvevict import EvictingCache, OptionError
from kvevict.evaluation import perplexity

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("the package lm-eval is not installed", allow_module_level=True)

# its dependencies warn on import, which is not ours to mend
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PAIRS = [
    ("The cat sat on a mat and", " saw a dog."),
    ("It", " ran."),
    ("The cat sat on a mat and", " ran away from it."),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(path)
    reader(len(byte_tokenizer()), max_position_embeddings=512).save_pretrained(path)
    return path


def made(folder: Path, **options: Any) -> Any:
    from kvevict.harness import KvevictLM

    return KvevictLM(pretrained=str(folder), device="cpu", dtype="float32", add_bos_token=False, **options)


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=n) for n, each in enumerate(arguments)]


def test_the_harness_knows_the_model_by_name(folder):
    from lm_eval.api.registry import get_model

    from kvevict.harness import KvevictLM

    assert get_model("kvevict") is KvevictLM
    model = KvevictLM.create_from_arg_string(
        f"pretrained={folder},policy=tova,budget=12,sinks=2,chunk=4,add_bos_token=False", {"device": "cpu"}
    )
    assert (model.policy.name, model.policy.sinks, model.budget, model.chunk) == ("tova", 2, 12, 4)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("policy", "budget"), [("tova", 6), ("random", 6), ("full", 6)])
def test_likelihoods_go_through_the_cache(folder, policy, budget, batch_size):
    """Each equals a reading of that text alone, whatever it was padded with."""
    model = made(folder, policy=policy, budget=budget, chunk=3, batch_size=batch_size)
    got = [score for score, _ in model.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)]
    plain = reader(len(byte_tokenizer()), max_position_embeddings=512)
    for (context, continuation), score in zip(PAIRS, got, strict=True):
        ids = torch.tensor(byte_tokenizer()(context + continuation)["input_ids"])
        make = DynamicCache if policy == "full" else partial(EvictingCache, plain, policy, budget)
        nll = perplexity(plain, ids, make, chunk=3).nll
        assert score == pytest.approx(-float(nll[-len(continuation) :].sum()), abs=1e-3)
    full = made(folder, policy="full", budget=1)
    if policy != "full":
        other = [score for score, _ in full.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)]
        assert abs(got[0] - other[0]) > 1e-3 and got[1] == pytest.approx(other[1], abs=1e-4)  # the second fits


def test_rolling_likelihoods_go_through_the_cache(folder):
    model = made(folder, policy="tova", budget=8, chunk=4)
    text = "The cat sat on a mat and saw a dog."
    (got,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    plain = reader(len(byte_tokenizer()), max_position_embeddings=512)
    ids = torch.tensor([model.prefix_token_id, *byte_tokenizer()(text)["input_ids"]])
    nll = perplexity(plain, ids, partial(EvictingCache, plain, "tova", 8), chunk=4).nll
    assert got == pytest.approx(-float(nll.sum()), abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_generation_goes_through_the_cache(folder, batch_size):
    model = made(folder, policy="sliding_window", budget=6, batch_size=batch_size)
    options = {"until": ["#"], "max_gen_toks": 8, "do_sample": False}
    contexts = ["The cat sat on a mat and", "It ran to its house"]
    got = model.generate_until(requests("generate_until", [(each, options) for each in contexts]), disable_tqdm=True)
    plain = reader(len(byte_tokenizer()), max_position_embeddings=512)
    for context, text in zip(contexts, got, strict=True):
        ids = torch.tensor([byte_tokenizer()(context)["input_ids"]])
        cache = EvictingCache(plain, "sliding_window", 6)
        evicted, full = (
            generate(plain, ids, each, new=8).sequences[0, ids.shape[1] :] for each in (cache, DynamicCache())
        )
        assert not evicted.equal(full)
        expected = byte_tokenizer().decode(evicted).split("<end>")[0]
        assert len(expected) > 1 and text.startswith(expected)  # the harness leaves special tokens out, and goes on


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "h20"}, "did you mean 'h2o'"),
        ({"budget": 0}, "budget=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"policy": "tova", "sinks": -1}, "sinks=-1"),
    ],
)
def test_mistakes_are_refused_before_the_model_is_loaded(options, message):
    with pytest.raises(OptionError, match=message):
        made(Path("nowhere"), **options)
