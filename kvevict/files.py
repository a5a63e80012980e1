"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvevict.errors import OutputError


def nearest(folder: Path) -> Path:
    """``folder``, or what is there of its path."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a file and puts it at ``path`` in one step: a reader sees the old file or the new one.

    Makes the folder if it is not there. Raises OutputError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        unfinished = Path(name)
        try:
            write(unfinished)
            unfinished.chmod(0o644)  # mkstemp lets only the owner read
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def write_file(path: Path, content: bytes) -> None:
    """Replaces one file in one step. Raises OutputError."""
    replace(path, lambda unfinished: unfinished.write_bytes(content))
