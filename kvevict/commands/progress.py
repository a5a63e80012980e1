"""A progress bar for the commands that can do without one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[int], None] | None]:
    """A bar where tqdm is installed, else nothing: the lab needs no extras."""
    if importlib.util.find_spec("tqdm") is None:
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=f" {unit}", mininterval=0.2 if sys.stderr.isatty() else 15, dynamic_ncols=True) as bar:

        def advance(done: int) -> None:
            bar.update(done)

        yield advance
