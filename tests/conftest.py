"""What test files share: a fixed seed, a small model and a text on disk, and kernels registered for one test only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import save_reader
from transformers import AttentionInterface, AttentionMaskInterface

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores: threads that wait for one another cost more than they bring


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of two layers whose tokens are bytes."""
    return save_reader(tmp_path_factory.mktemp("model"))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A text of 200 of its tokens."""
    path = tmp_path / "words.txt"
    path.write_text(("the cat sat on a mat and saw that dog; " * 6)[:200])
    return path


@pytest.fixture
def register_kernel() -> Iterator[Callable[[str, Any, Any], str]]:
    """Registers an attention function with its mask function, and takes both out again after the test."""
    names = []

    def register(name: str, kernel: Any, mask: Any) -> str:
        AttentionInterface.register(name, kernel)
        AttentionMaskInterface.register(name, mask)
        names.append(name)
        return name

    yield register
    for name in names:
        for registered in (name, f"kvevict_{name}"):
            AttentionInterface._global_mapping.pop(registered, None)
            AttentionMaskInterface._global_mapping.pop(registered, None)
