"""How a text is cut into forwards and fresh caches, and which of its tokens are predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict.errors import OptionError
from kvevict.policies.base import share_of

NAMES = ("streaming", "chunked", "windows", "blocks")


@dataclass(frozen=True)
class Span:
    """What one fresh cache reads: tokens ``start`` up to ``stop``, of which ``first`` up to ``stop`` are predicted."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Forward:
    """One forward: tokens ``start`` up to ``stop`` are fed after ``seen`` others of the same cache.

    first: the first token that it predicts for the result; later ones follow up to ``stop``, that one included.
    """

    start: int
    stop: int
    seen: int
    first: int


@dataclass(frozen=True)
class Protocol:
    """A way of reading a text. Make one with ``streaming``, ``chunked``, ``windows`` or ``blocks``.

    chunk:  tokens per forward; None feeds a window whole.
    window: tokens that one cache reads; None is the whole text.
    stride: tokens from one window's start to the next.
    """

    name: str
    chunk: int | None
    window: int | None = None
    stride: int | None = None

    def __str__(self) -> str:
        if self.window is None:
            return "streaming (1 token per forward)" if self.chunk == 1 else f"chunked streaming (chunk={self.chunk})"
        fed = "whole" if self.chunk is None else f"chunk={self.chunk}"
        if self.name == "blocks":
            return f"non-overlapping blocks (window={self.window}, {fed})"
        return f"strided windows (window={self.window}, stride={self.stride}, {fed})"

    @property
    def evicts(self) -> bool:
        """Whether a cache may evict before the last prediction: False if each cache sees a single forward."""
        return self.window is None or (self.chunk is not None and self.chunk < self.window)

    def spans(self, tokens: int) -> list[Span]:
        """The fresh caches that read a text of ``tokens`` tokens.

        Windows predict every token but the text's first, once, each in the first window that holds it. Blocks do not
        predict their first token, and an incomplete last block is dropped unless it is the only one.
        """
        if self.window is None or self.stride is None or tokens <= self.window:
            return [Span(0, tokens, 1)]
        if self.name == "blocks":
            starts = range(0, tokens - self.window + 1, self.window)
            return [Span(start, start + self.window, start + 1) for start in starts]
        spans = [Span(0, self.window, 1)]
        while spans[-1].stop < tokens:
            done = spans[-1].stop
            start = spans[-1].start + self.stride
            spans.append(Span(start, min(start + self.window, tokens), done))
        return spans

    def forwards(self, span: Span) -> list[Forward]:
        """The forwards of one span; its last token is fed to none, because nothing follows it."""
        last = span.stop - 1
        chunk = self.chunk or last - span.start
        return [
            Forward(start, min(start + chunk, last), start - span.start, max(start + 1, span.first))
            for start in range(span.start, last, chunk)
        ]

    def seen(self, tokens: int) -> Tensor:
        """For each predicted token, how many tokens its cache had seen before the forward that predicts it: (P,)."""
        counts = [
            torch.full((forward.stop + 1 - forward.first,), forward.seen)
            for span in self.spans(tokens)
            for forward in self.forwards(span)
            if forward.first <= forward.stop
        ]
        return torch.cat(counts)

    def work(self, tokens: int) -> int:
        """How many tokens are fed in all, those that windows share counted each time."""
        return sum(span.stop - 1 - span.start for span in self.spans(tokens))

    def predicted(self, tokens: int) -> Tensor:
        """The index in the text of each predicted token: (P,) int64, ascending."""
        return torch.cat([torch.arange(span.first, span.stop) for span in self.spans(tokens)])


def streaming() -> Protocol:
    """One token per forward through one cache: the protocol of StreamingLLM and TOVA.

    Sources: StreamingLLM (2023, https://arxiv.org/abs/2309.17453), TOVA (2024, https://arxiv.org/abs/2401.06104).
    """
    return Protocol("streaming", 1)


def chunked(chunk: int) -> Protocol:
    """``chunk`` tokens per forward through one cache; each forward attends to what the ones before it left."""
    return Protocol("chunked", _at_least("chunk", chunk, 1))


def windows(window: int, stride: int, chunk: int | None = None) -> Protocol:
    """A fresh cache for each window of ``window`` tokens, ``stride`` apart, that predicts what no earlier one did.

    ``chunk=None`` feeds a window in one forward, as published full-cache figures do; nothing can be evicted before
    its predictions are made. Source: the transformers guide on perplexity of fixed-length models
    (https://huggingface.co/docs/transformers/perplexity).
    """
    _at_least("window", window, 2)
    if _at_least("stride", stride, 1) >= window:
        raise OptionError(f"stride={stride} with window={window}: give less than the window, or use blocks({window})")
    return Protocol("windows", chunk if chunk is None else _at_least("chunk", chunk, 1), window, stride)


def blocks(window: int, chunk: int | None = None) -> Protocol:
    """A fresh cache for each block of ``window`` tokens, back to back; a block's first token is not predicted.

    ``chunk=None`` feeds a block in one forward, as published full-cache figures do; nothing can be evicted before
    its predictions are made. Source: the evaluation of GPTQ (2022, https://arxiv.org/abs/2210.17323).
    """
    _at_least("window", window, 2)
    return Protocol("blocks", chunk if chunk is None else _at_least("chunk", chunk, 1), window, window)


def make_protocol(
    name: str, *, chunk: int | None = None, window: int | None = None, stride: int | None = None
) -> Protocol:
    """A protocol from its name, one of ``NAMES``, and the options that it takes.

    ``chunk`` of "chunked" is 32 if left out. Raises OptionError for options that are missing or not the protocol's.

    >>> print(make_protocol("windows", window=2048, stride=512))
    strided windows (window=2048, stride=512, whole)
    """
    if name not in NAMES:
        raise OptionError(f"protocol {name!r}: there are {', '.join(NAMES)}")
    given = {option: value for option, value in (("window", window), ("stride", stride)) if value is not None}
    needed = {"windows": {"window", "stride"}, "blocks": {"window"}}.get(name, set())
    if missing := sorted(needed - set(given)):
        raise OptionError(f"protocol {name!r} needs {' and '.join(missing)}")
    if extra := sorted(set(given) - needed):
        raise OptionError(f"protocol {name!r} takes no {' and no '.join(extra)}: leave out, or choose another protocol")
    if name == "streaming":
        if chunk not in (None, 1):
            raise OptionError(f"protocol 'streaming' feeds one token per forward, not chunk={chunk}: use 'chunked'")
        return streaming()
    if name == "chunked":
        return chunked(32 if chunk is None else chunk)
    if window is not None and stride is not None:
        return windows(window, stride, chunk)
    assert window is not None  # checked above
    return blocks(window, chunk)


def outgrown(seen: Tensor, budget: int | float) -> Tensor:
    """Which predictions were made after the budget was exceeded: those of forwards with more tokens before them.

    seen: (P,) of ``Protocol.seen``. A budget that is a share of the tokens seen is exceeded by all but the first
    forward. A layer with less than the average budget may evict a little earlier. Returns (P,) bool.
    """
    return seen > (budget if isinstance(budget, int) else share_of(budget, seen))


def _at_least(option: str, value: int, least: int) -> int:
    if type(value) is not int or value < least:
        raise OptionError(f"{option}={value!r}: give at least {least} token{'s' * (least > 1)}")
    return value
