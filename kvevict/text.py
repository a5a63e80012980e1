"""Loads the text that models are measured on: WikiText-2, a file, a dataset, or Python's own documentation."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvevict.errors import TextError
from kvevict.models import hub_answers

WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
DATASETS_PREFIX = "datasets:"
ROWS_PREFIX = "rows:"
DOCUMENTS = ("whole", "articles", "rows")
TITLE = re.compile(r" ?= [^=\n]+ = ?\n?$")


@dataclass(frozen=True)
class Text:
    """A text and where it comes from.

    notice: why this text and not another; empty when it is the one that was asked for.
    rows: what it was joined from; a file taken as it is has none.
    """

    name: str
    text: str
    notice: str = ""
    rows: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8: for a file, the file's own."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def documents(self, how: str = "whole") -> list[str]:
        """The texts that are read separately: the whole; its WikiText articles; or its rows that are not blank.

        A file taken as it is has one row. An article starts at a line like " = Title = "; what precedes the first is
        left out if it is blank. Raises TextError for articles that the text does not have.
        """
        if how == "whole":
            return [self.text]
        if how == "articles":
            lines, end = (list(self.rows), "\n\n") if self.rows else (self.text.split("\n"), "\n")
            before = ["", *lines]  # a line like a title in the middle of a paragraph is a formula
            starts = [n for n, line in enumerate(lines) if TITLE.match(line) and not before[n].strip()]
            if not starts:
                raise TextError(
                    f"text {self.name!r} has no WikiText titles such as ' = Title = ': use documents='whole'"
                )
            cuts = [*starts, len(lines)]
            if any(line.strip() for line in lines[: starts[0]]):
                cuts.insert(0, 0)
            return [end.join(lines[start:stop]) for start, stop in pairwise(cuts)]
        if how == "rows":
            return [row for row in self.rows or (self.text,) if row.strip()]
        raise TextError(f"documents={how!r}: there are {', '.join(DOCUMENTS)}")


@dataclass(frozen=True)
class Tokens:
    """A text as a model reads it.

    ids:   (N,) int64.
    bytes: (N,) int64, how many bytes of the text in UTF-8 each token adds to those before it; None if the tokenizer
        does not tell which characters its tokens are.
    words: (N,) int64, how many words, separated by white space, begin in them; None like ``bytes``.
    """

    ids: Tensor
    bytes: Tensor | None
    words: Tensor | None


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None = None) -> Tokens:
    """The first ``most`` tokens of a text (all for None), with the tokenizer's own special tokens."""
    if not tokenizer.is_fast:  # only those written in Rust know offsets
        return Tokens(torch.tensor(tokenizer(text, verbose=False)["input_ids"][:most]), None, None)
    encoded = tokenizer(text, verbose=False, return_offsets_mapping=True)
    ends = torch.tensor([0, *(end for _, end in encoded["offset_mapping"][:most])]).cummax(0).values  # (N + 1,)
    sizes = [0] * (len(text) + 1)  # bytes before each character, and the words begun
    begun = [0] * (len(text) + 1)
    blank = True
    for place, letter in enumerate(text):
        sizes[place + 1] = sizes[place] + (1 if letter < "\x80" else len(letter.encode("utf-8", "surrogatepass")))
        begun[place + 1] = begun[place] + (blank and not letter.isspace())
        blank = letter.isspace()
    bytes_, words = (torch.tensor(before)[ends].diff() for before in (sizes, begun))
    return Tokens(torch.tensor(encoded["input_ids"][:most]), bytes_, words)


def load_text(source: str | None = None) -> Text:
    """Loads a text.

    source: a file's path, for the file as it is; "rows:PATH" for a file whose lines are a dataset's rows, such as
        WikiText's own files; "datasets:ID[:CONFIG[:SPLIT]]" for a dataset with a column "text"; or None for the test
        split of WikiText-2, and Python's documentation where that cannot be had. Rows are joined by blank lines, as
        published figures of WikiText do.

    Raises TextError.
    """
    if source is None:
        return _default()
    if source.startswith(DATASETS_PREFIX):
        names = source.removeprefix(DATASETS_PREFIX).split(":")
        if not names[0] or len(names) > 3:
            raise TextError(f"text {source!r}: expected datasets:ID, datasets:ID:CONFIG or datasets:ID:CONFIG:SPLIT")
        dataset, config, split = (*names, "", "")[:3]
        return _from_datasets(dataset, config or None, split or "test")
    if source == ROWS_PREFIX:
        raise TextError(f"text {source!r}: name the file, as in rows:wiki.test.raw")
    if source.startswith(ROWS_PREFIX):
        whole = _from_file(source.removeprefix(ROWS_PREFIX))
        # like the dataset: a row keeps its line's end, and a blank one is empty
        rows = [line if line.strip() else "" for line in whole.text.removesuffix("\n").split("\n")]
        return _from_rows(f"{ROWS_PREFIX}{whole.name}", [f"{row}\n" if row else "" for row in rows])
    return _from_file(source)


def _default() -> Text:
    if importlib.util.find_spec("datasets") is None:
        reason = "the package datasets is not installed"
    elif not hub_answers():
        reason = "the Hugging Face Hub cannot be reached"
    else:
        try:
            return _from_datasets(*WIKITEXT)
        except TextError as error:
            reason = str(error)
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some system packages of Python leave it out
        raise TextError(f"WikiText-2 cannot be loaded ({reason}): name a text file") from None
    return Text(
        name=f"pydoc_data.topics of Python {platform.python_version()}",
        text="\n\n".join(topics[name] for name in sorted(topics)),
        notice=f"WikiText-2 cannot be loaded ({reason}): using Python's own documentation, pydoc_data.topics, instead",
    )


def _from_datasets(dataset: str, config: str | None, split: str) -> Text:
    name = ":".join(filter(None, (dataset, config, split)))
    try:
        import datasets
    except ImportError:
        raise TextError(f"text {name!r} needs the package datasets. Run: pip install datasets") from None
    if not datasets.config.HF_HUB_OFFLINE and not Path(dataset).exists() and not hub_answers():
        raise TextError(f"text {name!r}: the Hugging Face Hub cannot be reached (HF_HUB_OFFLINE=1 uses a local copy)")
    try:
        rows: Any = datasets.load_dataset(dataset, config, split=split)
        lines = list(rows["text"])
    except Exception as error:  # datasets raises errors of several libraries, and KeyError for a missing column
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TextError(f"text {name!r} cannot be loaded: {first}") from error
    return _from_rows(name, lines)


def _from_rows(name: str, rows: list[str]) -> Text:
    return _not_empty(Text(name, "\n\n".join(rows), rows=tuple(rows)))


def _from_file(source: str) -> Text:
    path = Path(source).expanduser()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TextError(f"text {source!r} cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"text {source!r} is not UTF-8 (byte {error.start}): convert it first") from error
    if "\0" in text:
        raise TextError(f"text {source!r} is a binary file")
    return _not_empty(Text(path.name, text))


def _not_empty(text: Text) -> Text:
    if not text.text.strip():
        raise TextError(f"text {text.name!r} is empty")
    return text
