"""Needles: how they are generated, what a cache is asked, and how the answer is scored."""

from __future__ import annotations

import math
import re
import uuid
from functools import partial

import pytest
import torch
from helpers import byte_tokenizer, forward, reader, sharpened

from kvevict import EvictingCache, OptionError
from kvevict.errors import TextError
from kvevict.fidelity import full_cache
from kvevict.needles import KINDS, NOISE_SENTENCES, TASKS, Case, make_case, sentences_of, string_match
from kvevict.retrieval import graded_recall, logprob_without, recall

STRAW = [f"This is sentence number {n} of the text." for n in range(40)]
LENGTH = 1500


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return sharpened(reader(len(tokenizer), max_position_embeddings=4096))


# -- cases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_the_context_holds_the_answers_and_the_other_context_does_not(tokenizer, task, kind):
    case = make_case(tokenizer, STRAW, task=task, kind=kind, length=LENGTH)
    assert len(case.answers) == len(set(case.answers)) == (4 if task == "multivalue" else 1)
    for answer in case.answers:
        assert case.context.count(answer) == 1
        assert answer not in case.without and answer not in case.question
    assert string_match(case.answer, case.answers) == 1
    assert case.context.startswith(case.without[:20]) or task == "fact"  # the introduction stays


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("numbers", r"\d{7}"), ("words", "[a-z]+-[a-z]+"), ("uuids", "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")],
)
def test_values_are_of_their_kind(tokenizer, kind, pattern):
    answer = make_case(tokenizer, STRAW, kind=kind, length=LENGTH).answers[0]
    assert re.fullmatch(pattern, answer)
    assert kind != "uuids" or uuid.UUID(answer).version == 4


def test_several_keys_distract_from_one(tokenizer):
    case = make_case(tokenizer, STRAW, task="multikey", length=LENGTH)
    needles = re.findall(r"A secret number of the (\w+ \w+) is (\d{7})\.", case.context)
    assert len(needles) == 4 and len({key for key, _ in needles}) == 4
    asked = re.search(r"secret number of the (\w+ \w+)\?", case.question)[1]
    assert dict(needles)[asked] == case.answers[0]
    assert len(re.findall("A secret number", case.without)) == 3  # the distractors stay


def test_several_values_have_one_key_and_are_answered_in_the_order_of_the_text(tokenizer):
    case = make_case(tokenizer, STRAW, task="multivalue", length=LENGTH, depth=0.6)
    needles = re.findall(r"A secret number of the (\w+ \w+) is (\d{7})\.", case.context)
    assert len({key for key, _ in needles}) == 1
    assert tuple(value for _, value in needles) == case.answers
    assert "A secret number" not in case.without


def test_a_passkey_has_five_digits_and_a_fact_is_not_announced(tokenizer):
    assert re.fullmatch(r"\d{5}", make_case(tokenizer, STRAW, task="passkey", length=LENGTH).answers[0])
    fact = make_case(tokenizer, STRAW, task="fact", length=LENGTH, depth=0.5)
    assert fact.context.startswith("This is sentence number")
    assert fact.context.count(fact.question.strip()) == 1  # stated once, in the words that ask for it


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_stands_at_its_depth_between_sentences(tokenizer, depth):
    case = make_case(tokenizer, STRAW, length=LENGTH, depth=depth)
    before, after = case.context.split("\n\n", 1)[1].split("A secret number", 1)
    after = after.split(".", 1)[1]
    pieces = [len(re.findall("This is sentence", part)) for part in (before, after)]
    assert pieces[0] == round(depth * sum(pieces))
    assert before == "" or before.endswith("text. ")


@pytest.mark.parametrize("length", [400, 1000, 3001])
def test_cases_are_as_long_as_asked_for_but_for_a_sentence(tokenizer, length):
    case = make_case(tokenizer, STRAW, length=length)
    tokens = len(tokenizer(case.context + case.question + case.answer)["input_ids"])
    assert length - max(map(len, STRAW)) - 1 <= tokens <= length  # the haystack is repeated where it is short


def test_the_same_seed_gives_the_same_case_and_samples_differ(tokenizer):
    def case(**options) -> Case:
        return make_case(tokenizer, STRAW, length=LENGTH, **options)

    assert case() == case()
    assert len({case(seed=seed, sample=sample).answers for seed in (0, 1) for sample in (0, 1, 2)}) == 6


def test_what_cannot_be_made_is_an_error(tokenizer):
    with pytest.raises(OptionError, match=r"length=64 cannot hold .* raise it"):
        make_case(tokenizer, STRAW, length=64)
    with pytest.raises(OptionError, match="there are tasks single"):
        make_case(tokenizer, STRAW, task="double")
    with pytest.raises(TextError, match="empty"):
        sentences_of(" \n ")


def test_sentences_end_at_full_stops():
    assert sentences_of("One.  Two!\nThree? Four 3.5 five") == ["One.", "Two!", "Three?", "Four 3.5 five"]


# -- scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generated", "score"), [("it is ABC-1", 1.0), ("abc-1 and 22", 2 / 2), ("22", 0.5), ("", 0.0)]
)
def test_matches_ignore_case_and_count_each_answer(generated, score):
    answers = ("abc-1",) if generated == "it is ABC-1" else ("abc-1", "22")
    assert string_match(generated, answers) == score


def test_graded_recall_is_0_without_the_fact_and_1_with_the_full_cache():
    full, without = [-1.0, -3.0], [-9.0, -5.0]
    assert graded_recall(without, full, without) == 0
    assert graded_recall(full, full, without) == 1
    assert graded_recall([-5.0, -4.0], full, without) == 0.5
    assert math.isnan(graded_recall([-1.0], [-5.0], [-5.0]))  # a model that cannot use the fact shows nothing


def by_hand(model, tokenizer, case, make, question, chunk=None) -> tuple[float, str]:
    """Answer log-probability and the first two greedy tokens, written out with plain calls."""
    context, asked, answer = (
        torch.tensor(tokenizer(each)["input_ids"]) for each in (case.context, case.question, case.answer)
    )
    prompts = [torch.cat([context, asked])] if question == "with" else [context, asked]
    found = []
    for continuation in (answer, None):
        cache = make()
        for prompt in prompts:
            for block in prompt.split(chunk or len(prompt)):
                logits = forward(model, cache, block[None])[0]
        if continuation is None:
            token = logits[-1].argmax()
            second = forward(model, cache, token[None, None])[0, -1].argmax()
            found.append(tokenizer.decode([token, second]))
        else:
            rows = torch.cat([logits[-1:], forward(model, cache, answer[None, :-1])[0]])
            found.append(float(rows.log_softmax(-1).gather(1, answer[:, None]).sum()))
    return found[0], found[1]


@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.parametrize("question", ["after", "with"])
@pytest.mark.parametrize("policy", [None, "snapkv", "random"])
def test_the_cache_sees_what_the_protocol_says(model, tokenizer, policy, question, chunk):
    case = make_case(tokenizer, STRAW, length=500)
    make = partial(full_cache, model) if policy is None else partial(EvictingCache, model, policy, 60)
    got = recall(model, tokenizer, case, make, question=question, chunk=chunk)
    logprob, greedy = by_hand(model, tokenizer, case, make, question, chunk)
    assert got.logprob == pytest.approx(logprob, abs=1e-3)
    assert got.generated.startswith(greedy) and got.match == string_match(got.generated, case.answers)


def test_compressing_before_the_question_differs_from_compressing_with_it(model, tokenizer):
    case = make_case(tokenizer, STRAW, length=500)
    after, with_it = (
        recall(model, tokenizer, case, partial(EvictingCache, model, "snapkv", 60), question=question).logprob
        for question in ("after", "with")
    )
    full = recall(model, tokenizer, case, partial(full_cache, model)).logprob
    assert len({round(value, 3) for value in (after, with_it, full)}) == 3


def test_without_the_fact_is_the_full_cache_of_the_other_context(model, tokenizer):
    case = make_case(tokenizer, STRAW, length=500)
    other = Case(case.task, case.kind, case.length, case.depth, case.without, "", case.question, case.answers)
    expected = recall(model, tokenizer, other, partial(full_cache, model), question="with").logprob
    assert logprob_without(model, tokenizer, case) == pytest.approx(expected, abs=1e-3)


def test_noise_has_no_needle_in_it():
    assert not re.search(r"\d|secret|key|Captain", " ".join(NOISE_SENTENCES))
