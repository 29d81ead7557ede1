"""Why vLLM did not start, in one sentence."""

from __future__ import annotations

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
