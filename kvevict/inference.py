"""Tensors that outlive ``torch.inference_mode``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_inference_mode(function: Function) -> Function:
    """Tensors made under ``torch.inference_mode`` cannot be written in place once it ends; a cache's must be."""

    @functools.wraps(function)
    def normal(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast(Function, normal)
