"""`torch.compile` where there is a C++ compiler, plain functions where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_enabled = False


def enable(on: bool) -> bool:
    """Turn compilation on or off for what runs from now on; returns whether it is on.

    Without a C++ compiler on a CPU it stays off: the numbers are the same up to rounding, and slower.
    """
    global _enabled
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    _enabled = on and (compiler is not None or torch.cuda.is_available())
    return _enabled


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled at its first call for each set of shapes while compilation is on."""
    quick: Any = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal quick
        if not _enabled:
            return function(*args, **kwargs)
        if quick is None:
            quick = torch.compile(function, dynamic=False, fullgraph=True)
        result: R = quick(*args, **kwargs)
        return result

    return call
