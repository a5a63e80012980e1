"""What results of all kinds share: the versions that made them, and files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import kvevict
from kvevict.errors import OutputError
from kvevict.files import nearest, write_file

RESULTS = "results.jsonl"
PARTS = "parts"
"""The folder of finished parts: one file for each cell and piece, written whole or not at all."""


def versions() -> dict[str, Any]:
    """What a number depends on beside the inputs."""
    return {
        "kvevict": kvevict.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def environment() -> dict[str, Any]:
    """Versions, machine and time, as they go into results."""
    found = versions()
    threads = found.pop("threads")
    return {
        **found,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": threads,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def check_folder(folder: Path) -> None:
    """Raises OutputError if nothing can be written to ``folder``, which need not be there and is not made."""
    try:
        with tempfile.TemporaryFile(dir=nearest(folder)):
            pass
    except OSError as error:
        raise OutputError(f"results cannot be written to {str(folder)!r}: {error.strerror}") from error


def save_files(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Writes files by name, each whole or not at all; returns their paths. Raises OutputError."""
    check_folder(folder)
    for name, content in contents.items():
        write_file(folder / name, content)
    return [folder / name for name in contents]


def finite(value: Any) -> Any:
    """The same with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(value: Any) -> str:
    """One line of JSON; a number that is not finite is null."""
    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False) + "\n"


def read_rows(folder: Path, name: str = RESULTS) -> list[dict[str, Any]]:
    """The rows of a file of results. Raises OutputError if there is none that can be read."""
    try:
        # not splitlines(): JSON leaves U+2028 and its like within strings as they are
        rows = [json.loads(line) for line in (folder / name).read_text("utf-8").split("\n") if line]
    except OSError as error:
        raise OutputError(
            f"no {name} in {str(folder)!r} ({error.strerror}): give the folder that a finished kvevict perplexity, "
            "fidelity, needle, sweep, diagnose, growth or bench wrote"
        ) from error
    except ValueError as error:
        raise OutputError(f"{name} in {str(folder)!r} is damaged: {error}") from error
    if (name == RESULTS and not rows) or not all(isinstance(row, dict) for row in rows):
        raise OutputError(
            f"{name} in {str(folder)!r} is damaged: expected a JSON object on every line, and at least one"
        )
    return rows


def read_parts(folder: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a row's parts, by piece: "nats" holds a number for each predicted token.

    Raises OutputError for a part that cannot be read, or is none.
    """
    found = []
    for path in sorted((folder / PARTS).glob("*.json")):
        try:
            part = json.loads(path.read_text("utf-8"))
            key, piece, result = part["key"].items(), str(part["piece"]), part["result"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputError(
                f"{str(path)!r} is damaged, or not a part of results: {type(error).__name__}: {error}. Remove it, and "
                "run the command that wrote it again: it measures only what is missing"
            ) from error
        if all(row.get(name) == value for name, value in key):
            found.append((len(piece), piece, result))
    return [result for *_, result in sorted(found, key=lambda part: part[:2])]


def markdown_table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table whose first column is text and the others numbers."""
    rule = "|---" + "|---:" * (len(head) - 1) + "|"
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def aligned_table(head: list[str], lines: list[list[str]]) -> str:
    """The same as aligned text."""
    cells = [head, *lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    texts = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells]
    texts.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(texts)
