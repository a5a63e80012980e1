"""What a cell is measured on, one piece at a time: a document, or a needle's case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvevict.cache import EvictingCache
from kvevict.errors import OptionError
from kvevict.evaluation import perplexity
from kvevict.fidelity import fidelity, first_divergence, full_cache
from kvevict.needles import CHOOSABLE, NOISE, NOISE_SENTENCES, Case, make_case, sentences_of
from kvevict.plan import Cell, Generation, Plan, Source
from kvevict.protocols import Protocol
from kvevict.retrieval import logprob_without, recall
from kvevict.text import Text, Tokens, load_text, tokenize


@dataclass(frozen=True)
class Piece:
    """One document's tokens, or one case.

    name: what tells it from the other pieces of its text.
    size: its tokens, roughly.
    """

    name: str
    size: int
    tokens: Tokens | None = None
    case: Case | None = None


def load_source(plan: Plan, source: Source) -> Text:
    """The text of a source; "noise" is a haystack without content."""
    if plan.measure == "needle" and source.source == NOISE:
        return Text(NOISE, " ".join(NOISE_SENTENCES))
    text = load_text(source.source)
    if plan.measure != "needle":
        text.documents(source.documents)  # an error before any model is loaded
    return text


def make_pieces(plan: Plan, source: Source, text: Text, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Piece]:
    """The pieces of a text, in order; documents with fewer than two tokens have nothing to predict and are left out."""
    if plan.measure == "needle":
        sentences = list(NOISE_SENTENCES) if text.name == NOISE else sentences_of(text.text)
        return [
            Piece(f"{task} {kind} {length} {depth} {sample}", length, case=case)
            for task in plan.needle.tasks
            for kind in (plan.needle.kinds if task in CHOOSABLE else plan.needle.kinds[:1])
            for length in plan.needle.lengths
            for depth in plan.needle.depths
            for sample in range(plan.needle.samples)
            for case in [
                make_case(
                    tokenizer, sentences, task=task, kind=kind, length=length, depth=depth, seed=seed, sample=sample
                )
            ]
        ]
    pieces = []
    for number, document in enumerate(text.documents(source.documents)[: source.limit]):
        tokens = tokenize(tokenizer, document, source.tokens)
        if len(tokens.ids) > 1:
            pieces.append(Piece(str(number), len(tokens.ids), tokens))
    if not pieces:
        raise OptionError(f"text {text.name!r} has no document of two tokens")
    return pieces


def cache_maker(model: PreTrainedModel, cell: Cell) -> Callable[[], Cache]:
    """Makes the cell's cache."""
    if cell.policy is None or cell.budget is None:
        return partial(full_cache, model)
    return partial(EvictingCache, model, cell.policy, cell.budget)


def measure_piece(
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cell: Cell,
    piece: Piece,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """What one cell gives on one piece, as JSON holds it."""
    make = cache_maker(model, cell)
    if piece.case is not None:
        result = _needle(plan, model, tokenizer, piece.case, make, cell.policy is None)
        progress(piece.size)
        return result
    assert piece.tokens is not None and cell.protocol is not None  # a piece is a document or a case
    return _document(plan, model, piece.tokens, cell.protocol, make, progress)


def _document(
    plan: Plan,
    model: PreTrainedModel,
    tokens: Tokens,
    protocol: Protocol,
    make: Callable[[], Cache],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": len(tokens.ids)}
    if plan.measure == "perplexity":
        read = perplexity(model, tokens.ids, make, protocol=protocol, progress=progress)
        found |= {"nats": _short(read.nll), "held_bytes": read.held_bytes, "peak_bytes": read.peak_bytes}
        found["seconds"] = read.seconds
        positions = read.positions
    else:
        close = fidelity(model, tokens.ids, make, protocol=protocol, progress=progress)
        found |= {"nats": _short(close.nll), "kl": _short(close.kl), "agrees": close.agrees.int().tolist()}
        found["same_tokens"] = [
            first_divergence(model, prompt, make, plan.generation.new)
            for prompt in prompts_of(tokens.ids, plan.generation)
        ]
        positions = close.positions
    for name, counts in (("bytes", tokens.bytes), ("words", tokens.words)):
        found[name] = None if counts is None else int(counts[positions].sum())
    return found


def _needle(
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    case: Case,
    make: Callable[[], Cache],
    full: bool,
) -> dict[str, Any]:
    got = recall(model, tokenizer, case, make, question=plan.needle.question, chunk=plan.needle.chunk)
    return {
        "task": case.task,
        "kind": case.kind,
        "length": case.length,
        "depth": case.depth,
        "tokens": got.tokens,
        "answers": list(case.answers),
        "generated": got.generated,
        "match": got.match,
        "logprob": got.logprob,
        **({"logprob_without": logprob_without(model, tokenizer, case)} if full else {}),
    }


def prompts_of(ids: Tensor, generation: Generation) -> list[Tensor]:
    """Evenly spaced prompts; as many as fit without overlap, and one that is shorter where none does."""
    count = min(generation.prompts, max(len(ids) // generation.prompt, 1))
    if not count:
        return []
    step = len(ids) // count
    return [ids[number * step : number * step + generation.prompt] for number in range(count)]


def _short(values: Tensor) -> list[float]:
    """float32 numbers in as few digits as give them back."""
    return [float(str(value)) for value in values.numpy()]
