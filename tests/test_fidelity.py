"""Fidelity to the full cache: divergence, agreement, and where greedy decoding parts."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers import forward, generate, plain, reader, sharpened
from torch.nn import functional
from transformers import DynamicCache

from kvevict import EvictingCache, OptionError
from kvevict.errors import EvaluationError
from kvevict.evaluation import perplexity
from kvevict.fidelity import fidelity, first_divergence, full_cache
from kvevict.protocols import blocks, chunked, streaming, windows


@pytest.fixture(scope="module")
def model():
    return sharpened(reader())


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(128, (70,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("protocol", [streaming(), chunked(7), windows(16, 5, chunk=4), blocks(16, chunk=3)], ids=str)
def test_the_full_cache_is_true_to_itself(model, ids, protocol):
    close = fidelity(model, ids, partial(full_cache, model), protocol=protocol)
    assert close.mean_kl == 0 and close.agreement == 1


def test_losses_are_those_of_the_perplexity(model, ids):
    make = partial(EvictingCache, model, "h2o", 12)
    close = fidelity(model, ids, make, protocol=chunked(7))
    assert close.nll.equal(perplexity(model, ids, make, protocol=chunked(7)).nll)
    assert close.full_nll.equal(perplexity(model, ids, DynamicCache, protocol=chunked(7)).nll)
    assert close.positions.tolist() == list(range(1, 70)) and close.seen.tolist()[:8] == [0] * 7 + [7]


def test_divergence_and_agreement_are_those_of_the_logits(model, ids):
    """A window cache on 12 tokens, written out: the last token sees the newest four only."""
    make = partial(EvictingCache, model, "sliding_window", 3)
    close = fidelity(model, ids[:12], make, protocol=streaming())
    cache, full, kl, same = make(), DynamicCache(), [], []
    for token in ids[:11]:
        got, wanted = (forward(model, each, token[None, None])[0, -1] for each in (cache, full))
        kl.append(functional.kl_div(got.log_softmax(-1), wanted.log_softmax(-1), reduction="sum", log_target=True))
        same.append(got.argmax() == wanted.argmax())
    torch.testing.assert_close(close.kl, torch.stack(kl).clamp_min(0), atol=1e-5, rtol=1e-4)
    assert close.agrees.tolist() == [bool(each) for each in same]
    assert close.kl[:3].max() < 1e-6 < close.kl[4:].min()


def test_a_larger_budget_is_more_faithful(model, ids):
    kl = [fidelity(model, ids, partial(EvictingCache, model, "streaming_llm", budget)).mean_kl for budget in (8, 40)]
    assert kl[0] > kl[1] > 0


def test_greedy_decoding_is_that_of_generate_and_parts_where_it_parts(model, ids):
    make = partial(EvictingCache, model, "sliding_window", 6)
    expected = generate(model, ids[None, :20], plain(model), new=12).sequences[0, 20:]
    made = generate(model, ids[None, :20], make(), new=12).sequences[0, 20:]
    differs = (expected != made).nonzero()
    assert len(differs), "the case must part"
    assert first_divergence(model, ids[:20], make, new=12) == int(differs[0])
    assert int(differs[0]) >= 1  # the prompt is attended in full


def test_a_cache_that_forgets_nothing_never_parts(model, ids):
    assert first_divergence(model, ids[:20], partial(EvictingCache, model, "h2o", 100), new=9) == 9


def test_what_cannot_be_measured_is_an_error(model, ids):
    with pytest.raises(OptionError, match="one row"):
        fidelity(model, ids[:1], DynamicCache)
    with pytest.raises(OptionError, match="new=0"):
        first_divergence(model, ids, DynamicCache, new=0)
    with pytest.raises(OptionError, match="at least 1 token"):
        first_divergence(model, ids[:0], DynamicCache)
    broken = reader()
    broken.lm_head.weight.data[0] = math.nan
    with pytest.raises(EvaluationError, match="token 1 is NaN"):
        fidelity(broken, ids, DynamicCache)
