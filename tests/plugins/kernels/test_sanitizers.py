"""The same oracle tests on a build with AddressSanitizer and UndefinedBehaviorSanitizer: no report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_deepinfer_plugins.kernels.build import compiler

FOLDER = Path(__file__).parent


def runtime(name: str) -> str | None:
    """The compiler's file of a sanitizer's runtime, or None where it is not installed."""
    found = subprocess.run(
        [*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if Path(found).is_absolute() and Path(found).is_file() else None


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("KERNELS_UNDER_TEST") is not None, reason="this is that run")
def test_no_report() -> None:
    libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    if None in libraries:
        pytest.skip("the compiler has no libasan or libubsan")
    environment = os.environ | {
        "KERNELS_UNDER_TEST": "sanitized",
        "LD_PRELOAD": f"{libraries[0]} {os.environ.get('LD_PRELOAD', '')}".strip(),
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-s",
    ]
    folders = [str(FOLDER / name) for name in ("csrc", "test_attention.py")]
    done = subprocess.run([*command, *folders], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout and "runtime error" not in done.stderr
