"""Facts hidden in a text, and questions that tell which cache still holds them; all drawn from a seed.

The rules are RULER's (Hsieh et al., 2024, https://arxiv.org/abs/2404.06654): keys and values drawn at random, inserted
between sentences of a haystack at a depth, repeated haystack if it is short, one question at the end, scored by
whether the values occur in what the model writes. The wording is this project's own, so figures are comparable among
themselves, not with RULER's tables.
"""

from __future__ import annotations

import random
import re
import uuid
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvevict.errors import OptionError, TextError

TASKS = ("single", "multikey", "multivalue", "passkey", "fact")
KINDS = ("numbers", "words", "uuids")
CHOOSABLE = ("single", "multikey", "multivalue")
"""Tasks whose values are of a kind; the others have their own."""
QUESTIONS = ("after", "with")
NOISE = "noise"
"""The haystack that is sentences without content, repeated."""
MANY = 4
"""Keys of "multikey" and values of "multivalue", as in RULER."""

NOISE_SENTENCES = (
    "Rain fell on the hills.",
    "The river was calm.",
    "A cart went by.",
    "Nothing else happened that day.",
)
# a word per line would be a hundred lines
# fmt: off
ADJECTIVES = [
    "amber", "ancient", "bitter", "blue", "brave", "bright", "calm", "clever", "cold", "copper", "crimson", "curly",
    "dusty", "eager", "early", "faint", "fierce", "golden", "gentle", "green", "hollow", "humble", "icy", "jolly",
    "keen", "late", "lively", "lonely", "lucky", "mellow", "narrow", "noble", "odd", "pale", "plain", "proud",
    "quiet", "rapid", "rusty", "silent", "silver", "steep", "sturdy", "sunny", "tidy", "vast", "velvet", "warm",
    "wild", "young",
]
NOUNS = [
    "anchor", "apple", "arrow", "badger", "barrel", "basket", "beacon", "bridge", "button", "candle", "canyon",
    "castle", "cedar", "cloud", "comet", "cradle", "dagger", "dolphin", "engine", "falcon", "feather", "fiddle",
    "forest", "garden", "glacier", "hammer", "harbor", "helmet", "island", "kettle", "ladder", "lantern", "magnet",
    "marble", "meadow", "mirror", "monkey", "needle", "orchard", "paddle", "pebble", "pillow", "planet", "pocket",
    "rabbit", "ribbon", "saddle", "thunder", "violin", "willow",
]
# fmt: on


@dataclass(frozen=True)
class Case:
    """One haystack with its needles and the question.

    context:  the text with the needles in it; without: the same text without those that are asked for.
    question: what follows the context, up to where the answer begins.
    answers:  the values that a right answer contains, in the order of the text.
    """

    task: str
    kind: str
    length: int
    depth: float
    context: str
    without: str
    question: str
    answers: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The right answer as it would follow the question."""
        return " " + ", ".join(self.answers)


def sentences_of(haystack: str) -> list[str]:
    """The sentences of a text, or lines where it has no full stops. Raises TextError if there are none."""
    flat = " ".join(haystack.split())
    found = [sentence for sentence in re.split(r"(?<=[.!?])\s+", flat) if sentence]
    if not found:
        raise TextError("the haystack is empty")
    return found


def make_case(
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    *,
    task: str = "single",
    kind: str = "numbers",
    length: int = 512,
    depth: float = 0.5,
    seed: int = 0,
    sample: int = 0,
) -> Case:
    """A case of at most ``length`` tokens, question and answer included; the same for the same arguments.

    task:  "single", one needle; "multikey", four needles of which one is asked for; "multivalue", four values of one
        key, all asked for; "passkey", a five-digit number; "fact", a sentence that nothing announces.
    kind:  what values are: "numbers" of seven digits, two "words", or "uuids". Passkeys and facts have their own.
    depth: where the needle stands, from 0 (the start) to 1 (the end). Of four needles it is the first one asked for,
        and the others are spread evenly from there.

    Raises OptionError if ``length`` is too short.
    """
    draw = random.Random(f"{seed} {task} {kind} {length} {depth} {sample}")
    intro, needles, asked, question = _needles(draw, task, kind)
    places = [(depth + number / len(needles)) % 1 if number else depth for number in range(len(needles))]
    answers = tuple(value for _, value, _ in sorted(_placed(needles, places)[:asked], key=lambda needle: needle[2]))
    first = draw.randrange(len(sentences))

    def contexts(count: int) -> tuple[str, str]:
        straw = [sentences[(first + number) % len(sentences)] for number in range(count)]
        return intro + _woven(straw, needles, places, 0), intro + _woven(straw, needles, places, asked)

    end = question + " " + ", ".join(answers)

    def tokens(count: int) -> int:
        return len(tokenizer(contexts(count)[0] + end, verbose=False)["input_ids"])

    if tokens(1) > length:
        raise OptionError(f"length={length} cannot hold the needle and the question ({tokens(1)} tokens): raise it")
    low, high = 1, 2
    while tokens(high) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle)
    context, without = contexts(low)
    return Case(task, kind if task in CHOOSABLE else "its own", length, depth, context, without, question, answers)


def string_match(generated: str, answers: tuple[str, ...]) -> float:
    """The share of the answers that occur in what was generated, whatever their case: RULER's score.

    >>> string_match("They are 12 and 99.", ("12", "34"))
    0.5
    """
    return sum(answer.lower() in generated.lower() for answer in answers) / len(answers)


def _needles(draw: random.Random, task: str, kind: str) -> tuple[str, list[tuple[str, str]], int, str]:
    """The introduction, the needles (sentence, value), how many of the first are asked for, and the question."""
    if task not in TASKS or kind not in KINDS:
        raise OptionError(f"task={task!r}, kind={kind!r}: there are tasks {', '.join(TASKS)}; kinds {', '.join(KINDS)}")
    if task == "passkey":
        key = str(draw.randrange(10_000, 100_000))
        intro = "A pass key is hidden in the text below. Find it and remember it.\n\n"
        return intro, [(f"The pass key is {key}. Remember it.", key)], 1, "\n\nWhat is the pass key? The pass key is"
    if task == "fact":
        who, town = draw.choice(ADJECTIVES).capitalize(), draw.choice(NOUNS).capitalize()
        stem = f"Captain {who} was born in a village called"
        return "", [(f"{stem} {town}.", town)], 1, f"\n\n{stem}"
    name = {"numbers": "number", "words": "word", "uuids": "UUID"}[kind]
    keys = draw.sample([f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS], MANY)
    values = [_value(draw, kind) for _ in range(MANY)]
    while len(set(values)) < MANY:
        values = [_value(draw, kind) for _ in range(MANY)]
    intro = (
        f"Every secret {name} in the text below must be remembered, because there will be a question about them.\n\n"
    )
    if task == "single":
        keys, values = keys[:1], values[:1]
    if task == "multivalue":
        keys = keys[:1] * MANY
    needles = [(f"A secret {name} of the {key} is {value}.", value) for key, value in zip(keys, values, strict=True)]
    if task == "multivalue":
        stem = f"the secret {name}s of the {keys[0]} are"
        return intro, needles, MANY, f"\n\nQuestion: which are all the secret {name}s of the {keys[0]}?\nAnswer: {stem}"
    stem = f"a secret {name} of the {keys[0]} is"
    return intro, needles, 1, f"\n\nQuestion: what is a secret {name} of the {keys[0]}?\nAnswer: {stem}"


def _value(draw: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(draw.randrange(1_000_000, 10_000_000))
    if kind == "words":
        return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _placed(needles: list[tuple[str, str]], places: list[float]) -> list[tuple[str, str, float]]:
    return [(sentence, value, place) for (sentence, value), place in zip(needles, places, strict=True)]


def _woven(straw: list[str], needles: list[tuple[str, str]], places: list[float], left_out: int) -> str:
    """The straw with the needles between its sentences, without the first ``left_out`` needles."""
    at: dict[int, list[str]] = {}
    for sentence, _, place in sorted(_placed(needles, places)[left_out:], key=lambda needle: needle[2]):
        at.setdefault(round(place * len(straw)), []).append(sentence)
    return " ".join(piece for n in range(len(straw) + 1) for piece in [*at.get(n, []), *straw[n : n + 1]])
