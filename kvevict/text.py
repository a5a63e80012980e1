"""Loads the text that models are measured on: WikiText-2, a file, a dataset, or Python's own documentation."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvevict.errors import TextError
from kvevict.models import hub_answers

WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
DATASETS_PREFIX = "datasets:"


@dataclass(frozen=True)
class Text:
    """A text and where it comes from.

    notice: why this text and not another; empty when it is the one that was asked for.
    """

    name: str
    text: str
    notice: str = ""

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8: for a file, the file's own."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def load_text(source: str | None = None) -> Text:
    """Loads a text.

    source: a file's path; "datasets:ID[:CONFIG[:SPLIT]]" for a dataset with a column "text"; or None for the test
        split of WikiText-2 with rows joined by blank lines, and Python's documentation where that cannot be had.

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
    return _not_empty(Text(name, "\n\n".join(lines)))


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
