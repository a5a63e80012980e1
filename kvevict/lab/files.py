"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvevict.compare import check_folder
from kvevict.errors import OutputError


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Writes each file into ``folder`` in one step: a reader sees the old file or the new one. Returns their paths.

    Raises OutputError.
    """
    check_folder(folder)
    for name, content in contents.items():
        write_file(folder / name, content)
    return [folder / name for name in contents]


def write_file(path: Path, content: bytes) -> None:
    """Replaces one file in one step. Raises OutputError."""
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            Path(unfinished).chmod(0o644)  # mkstemp lets only the owner read
            Path(unfinished).replace(path)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"{str(path)!r} cannot be written: {error.strerror}") from error
