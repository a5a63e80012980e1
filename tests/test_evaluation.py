"""Perplexity by every protocol against plain transformers loops, and texts cut into documents and tokens."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers import byte_tokenizer, reader
from tokenizers.processors import TemplateProcessing
from torch.nn import functional
from transformers import DynamicCache

from kvevict import EvictingCache, OptionError
from kvevict.errors import TextError
from kvevict.evaluation import perplexity
from kvevict.host import cache_argument
from kvevict.protocols import Protocol, blocks, chunked, make_protocol, outgrown, streaming, windows
from kvevict.text import Text, load_text, tokenize

PROTOCOLS = [streaming(), chunked(7), windows(16, 5), windows(16, 5, chunk=4), blocks(16), blocks(16, chunk=3)]
AGREE = 1e-4
"""Relative difference of perplexities: float32 sums in another order."""


@pytest.fixture(scope="module")
def model():
    return reader()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(128, (70,), generator=torch.Generator().manual_seed(1))


# -- plain loops that share nothing with kvevict -----------------------------------------------------------------


def one_by_one(model, ids, step):
    """One cache, ``step`` tokens per call."""
    cache, losses = DynamicCache(config=model.config), []
    for start in range(0, len(ids) - 1, step):
        inputs = ids[start : start + step][: len(ids) - 1 - start]
        logits = model(inputs[None], use_cache=True, **{cache_argument(model): cache}).logits[0]
        losses.append(functional.cross_entropy(logits, ids[start + 1 : start + 1 + len(inputs)], reduction="none"))
    return torch.cat(losses)


def strided(model, ids, window, stride):
    """The loop of the transformers guide, with its mean over tokens instead of over windows."""
    losses, previous = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        labels = ids[begin:end].clone()
        labels[: -(end - previous)] = -100
        logits = model(ids[None, begin:end]).logits[0]
        losses.append(functional.cross_entropy(logits[:-1], labels[1:], reduction="none")[labels[1:] != -100])
        previous = end
        if end == len(ids):
            break
    return torch.cat(losses)


def cut(model, ids, window):
    """The loop of GPTQ's evaluation."""
    losses = []
    for block in ids[: len(ids) // window * window].view(-1, window):
        logits = model(block[None]).logits[0]
        losses.append(functional.cross_entropy(logits[:-1], block[1:], reduction="none"))
    return torch.cat(losses)


def plain(model, ids, protocol: Protocol) -> float:
    with torch.no_grad():
        if protocol.name in ("streaming", "chunked"):
            losses = one_by_one(model, ids, protocol.chunk)
        elif protocol.name == "windows":
            losses = strided(model, ids, protocol.window, protocol.stride)
        else:
            losses = cut(model, ids, protocol.window)
    return losses.double().mean().exp().item()


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
def test_the_full_cache_agrees_with_a_plain_loop(model, ids, protocol):
    result = perplexity(model, ids, partial(DynamicCache, config=model.config), protocol=protocol)
    assert result.perplexity == pytest.approx(plain(model, ids, protocol), rel=AGREE)


def test_the_protocols_give_different_figures(model, ids):
    figures = [plain(model, ids, protocol) for protocol in (streaming(), windows(16, 5), blocks(16))]
    assert min(abs(a - b) / a for a, b in pairwise(figures)) > 10 * AGREE


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 21, 64, 70])
def test_every_token_is_predicted_once_but_for_those_without_context(protocol, tokens):
    predicted = protocol.predicted(tokens).tolist()
    if protocol.name == "blocks" and tokens > 16:
        assert predicted == [position for position in range(tokens // 16 * 16) if position % 16]
    else:
        assert predicted == list(range(1, tokens))
    assert len(protocol.seen(tokens)) == len(predicted)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
def test_each_span_feeds_its_tokens_once_in_order(protocol):
    for span in protocol.spans(70):
        fed = [token for forward in protocol.forwards(span) for token in range(forward.start, forward.stop)]
        assert fed == list(range(span.start, span.stop - 1))


def test_results_say_what_was_predicted_and_after_how_many_tokens(model, ids):
    result = perplexity(model, ids[:10], DynamicCache, protocol=chunked(4))
    assert result.positions.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert result.seen.tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    result = perplexity(model, ids[:10], DynamicCache, protocol=windows(6, 2, chunk=2))
    assert result.positions.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert result.seen.tolist() == [0, 0, 2, 2, 4, 2, 4, 2, 4]


def test_each_span_has_a_fresh_cache(model, ids):
    made = []

    def make():
        made.append(DynamicCache(config=model.config))
        return made[-1]

    perplexity(model, ids[:64], make, protocol=blocks(16, chunk=4))
    assert [cache.get_seq_length() for cache in made] == [15, 15, 15, 15]


@pytest.mark.parametrize("protocol", [streaming(), chunked(7), windows(40, 20, chunk=5), blocks(35, chunk=5)], ids=str)
def test_predictions_before_the_budget_was_exceeded_are_the_full_cache_s(model, ids, protocol):
    budget = 12
    full = perplexity(model, ids, DynamicCache, protocol=protocol)
    tova = perplexity(model, ids, partial(EvictingCache, model, "tova", budget), protocol=protocol)
    after = outgrown(tova.seen, budget)
    assert 0 < after.sum() < len(after)
    torch.testing.assert_close(tova.nll[~after], full.nll[~after], atol=1e-5, rtol=1e-5)
    assert (tova.nll[after] - full.nll[after]).abs().min() > 1e-7  # each of the others is another number
    assert tova.perplexity_after(budget) == pytest.approx(tova.nll[after].double().mean().exp().item())
    assert math.isnan(tova.perplexity_after(1000))


def test_a_share_is_exceeded_after_the_first_forward():
    seen = torch.tensor([0, 0, 4, 8])
    assert outgrown(seen, 0.5).tolist() == [False, False, True, True]
    assert outgrown(seen, 1.0).tolist() == [False, False, False, False]
    assert outgrown(seen, 4).tolist() == [False, False, False, True]


def test_protocols_say_when_no_cache_can_evict():
    assert [protocol.evicts for protocol in PROTOCOLS] == [True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("stream", {}, "there are streaming, chunked, windows, blocks"),
        ("windows", {"window": 8}, "needs stride"),
        ("blocks", {}, "needs window"),
        ("blocks", {"window": 8, "stride": 4}, "takes no stride"),
        ("chunked", {"window": 8}, "takes no window"),
        ("streaming", {"chunk": 8}, "one token per forward"),
        ("chunked", {"chunk": 0}, "chunk=0: give at least 1 token"),
        ("windows", {"window": 8, "stride": 8}, r"use blocks\(8\)"),
        ("windows", {"window": 8, "stride": 0}, "stride=0"),
        ("blocks", {"window": 1}, "window=1: give at least 2 tokens"),
        ("blocks", {"window": 8.5}, "window=8.5"),
    ],
)
def test_protocols_that_cannot_work_are_refused(name, options, message):
    with pytest.raises(OptionError, match=message):
        make_protocol(name, **options)


def test_chunk_and_protocol_together_are_refused(model, ids):
    with pytest.raises(OptionError, match="give the chunk to the protocol"):
        perplexity(model, ids, DynamicCache, chunk=4, protocol=streaming())


# -- texts -------------------------------------------------------------------------------------------------------

WIKI = " \n = One = \n \n A line .\n = = Part = = \n \n where\n = 3 x and = \n \n = Two = \n \n More .\n"


def test_articles_start_at_titles_and_not_at_formulas_or_sections():
    articles = Text("wiki", WIKI).documents("articles")
    assert [article.splitlines()[0] for article in articles] == [" = One = ", " = Two = "]
    assert "3 x and" in articles[0] and "Part" in articles[0]
    assert "\n".join([" ", *articles]) == WIKI


def test_text_before_the_first_title_is_a_document_unless_it_is_blank():
    assert Text("wiki", "Preface\n\n = One = \nA").documents("articles") == ["Preface\n", " = One = \nA"]


def test_lines_as_rows_are_the_dataset_s_form(tmp_path):
    path = tmp_path / "wiki.raw"
    path.write_text(WIKI)
    text = load_text(f"rows:{path}")
    assert text.name == "rows:wiki.raw"
    assert text.rows[:4] == ("", " = One = \n", "", " A line .\n")  # blank rows are empty, others keep their end
    assert text.text.startswith("\n\n = One = \n\n\n\n\n A line .\n\n\n = = Part")
    assert [article.splitlines()[0] for article in text.documents("articles")] == [" = One = ", " = Two = "]
    assert text.documents("rows")[:2] == [" = One = \n", " A line .\n"]
    assert load_text(str(path)).documents("rows") == [WIKI]  # a file is one row


@pytest.mark.parametrize(
    ("how", "message"),
    [("articles", "no WikiText titles"), ("pages", "whole, articles, rows")],
)
def test_documents_that_a_text_does_not_have_are_an_error(how, message):
    with pytest.raises(TextError, match=message):
        Text("plain", "No titles here").documents(how)


def test_bytes_and_words_of_tokens_add_up_to_those_of_the_text():
    text = " Zwei  Wörter – और\nmehr "
    tokens = tokenize(byte_tokenizer(), text)
    assert tokens.bytes.sum() == len(text.encode())
    assert tokens.words.sum() == len(text.split()) == 5
    for most in range(1, len(tokens.ids)):
        part = tokenize(byte_tokenizer(), text, most)
        assert part.bytes.equal(tokens.bytes[:most]) and part.words.equal(tokens.words[:most])


@pytest.mark.parametrize(
    ("form", "sizes", "words"),
    [("<end> $A", [0, 1, 1, 1, 1], [0, 1, 0, 0, 1]), ("$A <end>", [1, 1, 1, 1, 0], [1, 0, 0, 1, 0])],
)
def test_special_tokens_add_no_bytes_and_no_words(form, sizes, words):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=form, special_tokens=[("<end>", tokenizer.eos_token_id)]
    )
    tokens = tokenize(tokenizer, "ab c")
    assert tokens.bytes.tolist() == sizes
    assert tokens.words.tolist() == words
