"""A user's mistake on vLLM's command line, in one sentence.

Stock ``vllm serve`` shows every refusal as a stack trace of some forty lines. The general plugin puts an
excepthook into that process, and into no other: what it does not know goes to the hook that was there before.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pydantic import ValidationError

from vllm_deepinfer.errors import UserError

from .diagnosis import diagnosis, model_of

EXIT_CODE = 2
RELAY = "DEEPINFER_REFUSAL_FILE"
"""Environment variable: the file in which an engine's process leaves its sentence for the command line's."""
FLAGS = {"SpeculativeConfig": "--speculative-config"}
"""vLLM's own checks of what our drafter is started with, by the class that makes them."""


def sentence_of(error: BaseException | None) -> str | None:
    """The sentence of the first of our errors in a chain of exceptions, pydantic's wrapping included.

    Or of vLLM's own, for the flags that this project's features are started with.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, UserError):
            return str(error)
        if isinstance(error, ValidationError):
            for problem in error.errors():
                cause = problem.get("ctx", {}).get("error")
                if isinstance(cause, UserError):
                    return str(cause)
            if error.title in FLAGS:
                return _of_flag(error)
        error = error.__cause__ or error.__context__
    return None


def _of_flag(error: ValidationError) -> str:
    """What vLLM finds wrong about an object that a flag takes."""
    first = error.errors()[0]
    problem = " ".join(first["msg"].removeprefix("Value error, ").split()).rstrip(".")
    key = ".".join(map(str, first["loc"]))
    what = f"{FLAGS[error.title]} has {key} {first['input']!r}" if key else FLAGS[error.title]
    return f"{what}: {problem[0].lower()}{problem[1:]}"


def install() -> None:
    """Put the hook in if this is the process of vLLM's command line. Idempotent."""
    if Path(sys.argv[0]).name != "vllm" or getattr(sys.excepthook, "deepinfer", False):
        return
    before = sys.excepthook
    if multiprocessing.parent_process() is None:
        _open_relay()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sentence = sentence_of(error) or _relayed() or diagnosis(model_of(sys.argv))
        if sentence is None:
            before(kind, error, trace)
            return
        print(f"vllm: error: {sentence}", file=sys.stderr, flush=True)
        # An excepthook cannot change the exit code otherwise, and no engine runs yet that must be closed.
        os._exit(EXIT_CODE)

    hook.deepinfer = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def refuse(error: UserError) -> NoReturn:
    """Refuse to start from within an engine's process.

    vLLM logs any exception there with its stack trace, and raises one of its own, with another, in the
    process of the command line. Where that is `vllm`, the sentence is left for it and this one just ends.

    Raises:
        SystemExit: In such a process. UserError: `error`, anywhere else.
    """
    relay = os.environ.get(RELAY)
    if relay is None or multiprocessing.parent_process() is None:
        raise error
    Path(relay).write_text(str(error))
    raise SystemExit(EXIT_CODE)  # the one exception that vLLM's engine process ends on without a word


def _open_relay() -> None:
    handle, path = tempfile.mkstemp(prefix="deepinfer-refusal-")
    os.close(handle)
    os.environ[RELAY] = path
    atexit.register(lambda: Path(path).unlink(missing_ok=True))


def _relayed() -> str | None:
    """What an engine's process has left; the file goes with it, because `os._exit` runs no exit handlers."""
    path = os.environ.get(RELAY)
    if path is None:
        return None
    with contextlib.suppress(OSError):
        sentence = Path(path).read_text()
        Path(path).unlink()
        return sentence or None
    return None
