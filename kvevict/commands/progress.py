"""Progress bars."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def bar(**options: Any) -> Any:
    """A bar of tqdm's, drawn seldom where it goes to a file."""
    from tqdm import tqdm

    return tqdm(mininterval=0.2 if sys.stderr.isatty() else 15, dynamic_ncols=True, **options)


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[int], None] | None]:
    """A bar where tqdm is installed, else nothing: the lab needs no extras."""
    if importlib.util.find_spec("tqdm") is None:
        yield None
        return
    with bar(total=total, unit=f" {unit}") as shown:

        def advance(done: int) -> None:
            shown.update(done)

        yield advance
