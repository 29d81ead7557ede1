"""Why vLLM did not start, or did not take a request, in one sentence."""

from __future__ import annotations

import re

from pydantic import ValidationError

from vllm_deepinfer_plugins.cli_errors import sentence_of
from vllm_deepinfer_plugins.diagnosis import diagnosis


def reason_of(error: BaseException, model: str | None = None) -> str:
    """Our own sentence, from the chain of exceptions or about the checkpoint folder ``model``.

    Without one, the first line of what vLLM says.
    """
    ours = sentence_of(error) or diagnosis(model)
    if ours is not None:
        return ours
    text = str(error)
    if isinstance(error, ValidationError) and error.errors():
        text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return first.replace(" See root cause above.", " vLLM's log above says why.").removesuffix(
        " Failed core proc(s): {}"
    )


# What xgrammar puts before its reasons: the time and a line of its own sources.
_SOURCE_LINE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


def refusal_of(error: BaseException) -> str:
    """What is wrong with a request; for a constraint also why, which vLLM often says in the cause alone."""
    said = _first_line(error)
    why = _first_line(error.__cause__) if error.__cause__ is not None else ""
    return said if not why or why in said else f"{said.rstrip('.')}: {why}"


def _first_line(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return _SOURCE_LINE.sub("", first)
