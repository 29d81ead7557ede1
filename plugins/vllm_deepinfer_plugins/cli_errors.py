"""A user's mistake on vLLM's command line, in one sentence.

Stock ``vllm serve`` shows every refusal as a stack trace of some forty lines. The general plugin puts an
excepthook into that process, and into no other: what it does not know goes to the hook that was there before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from vllm_deepinfer.errors import UserError

EXIT_CODE = 2


def sentence_of(error: BaseException | None) -> str | None:
    """The sentence of the first of our errors in a chain of exceptions, pydantic's wrapping included."""
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
        error = error.__cause__ or error.__context__
    return None


def install() -> None:
    """Put the hook in if this is the process of vLLM's command line. Idempotent."""
    if Path(sys.argv[0]).name != "vllm" or getattr(sys.excepthook, "deepinfer", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sentence = sentence_of(error)
        if sentence is None:
            before(kind, error, trace)
            return
        print(f"vllm: error: {sentence}", file=sys.stderr, flush=True)
        # An excepthook cannot change the exit code otherwise, and no engine runs yet that must be closed.
        os._exit(EXIT_CODE)

    hook.deepinfer = True  # type: ignore[attr-defined]
    sys.excepthook = hook
