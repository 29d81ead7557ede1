"""The library compiled for several processors: the same tests run on each.

``KERNELS_UNDER_TEST=sanitized`` leaves only the build with sanitizers; `test_sanitizers` sets it for its own
process.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Kernels
from vllm_deepinfer_plugins.kernels.build import build

from tests.conftest import CACHE

X86 = platform.machine() in ("x86_64", "AMD64")
_NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16") if X86 else ()
SANITIZED = (
    *_NO_TILES,  # no sanitizer looks into a tile load
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
VARIANTS: dict[str, tuple[str, ...]] = {"native": ()}
if X86:
    VARIANTS |= {
        "vectors": _NO_TILES,
        "x86-64-v3": ("-march=x86-64-v3",),
        "x86-64": ("-march=x86-64",),
    }
if os.environ.get("KERNELS_UNDER_TEST") == "sanitized":
    VARIANTS = {"sanitized": SANITIZED}


@cache
def compiled(name: str) -> Kernels:
    """The library with a variant's flags, kept under ``.cache`` from run to run."""
    if name == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    return Kernels(build(CACHE / "kernels", VARIANTS[name]))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many OpenMP threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
