"""What the recipe package says about a request, in plain words and with the place.

Its parser speaks Rust ("invalid type: string "5", expected u32") and does not say where. Both are mended
here, on the way of an error only: the sentence by rewriting it, the place by converting parts of the request
until one of them fails with the same sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from deepseek_recipe import ConversionError

from vllm_deepinfer.gateway.errors import ApiError, sentence

Attempt = Callable[[dict[str, Any]], object]
_MOST_ATTEMPTS = 200

_KINDS = (  # what the parser expects → what to send
    (r"(?:u8|u16|u32|u64|usize)\b", "a whole number, 0 or more"),
    (r"(?:i8|i16|i32|i64|isize)\b", "a whole number"),
    (r"f(?:32|64)\b", "a number"),
    (r"a boolean", "true or false"),
    (r"a (?:borrowed )?string|variant identifier", "a string"),
    (r"a sequence", "a list"),
    (r"(?:struct|internally tagged enum|adjacently tagged enum|enum) \w+|a map", "an object"),
)
_MISSING = re.compile(r"missing field `(\w+)`")
_WANTED = {
    "content": "a string or a list of parts",
    "input": "a string or a list of items",
    "max_tokens": "how many tokens the answer may have",
    "messages": 'a list such as [{"role": "user", "content": "Hello"}]',
    "model": "one of the names of GET /v1/models",
    "role": "user, assistant or another role of this API",
}
_EXPECTED = [(re.compile(rf"^(?:{kind}).*", re.DOTALL), send) for kind, send in _KINDS]
_TYPE = re.compile(r"invalid (?:type:|value:|length) (.*), expected (.*)$", re.DOTALL)
_VARIANT = re.compile(r"unknown variant `(.*)`, expected (?:one of )?(.*)$", re.DOTALL)
_GIVEN = re.compile(r"^(?:string|integer|floating point|boolean|character|byte array) ")


def plain(text: str) -> str:
    """One of the recipe's sentences without the words of its parser."""
    text = text.strip().removeprefix("invalid request body:").strip().removesuffix(".")
    text = re.sub(r"^field `(\w+)`: ", r"\1: ", text)
    if found := _TYPE.search(text):
        send = found[2]
        for pattern, meaning in _EXPECTED:
            send = pattern.sub(meaning, send)
        return sentence(f"{text[: found.start()]}send {send}, got {_given(found[1])}")
    if found := _VARIANT.search(text):
        choices = found[2].replace("`", "")
        one_of = "one of " if "," in choices else ""
        return sentence(f"{text[: found.start()]}send {one_of}{choices}; got {_short(found[1])!r}")
    text = _MISSING.sub(lambda found: f"{found[1]} is missing: send {_WANTED.get(found[1], 'it')}", text)
    return sentence(text.replace("`", ""))


def located(error: ConversionError | ValueError, body: dict[str, Any], attempt: Attempt) -> ApiError:
    """The error of converting `body`, which `attempt` raised, with the part of the body that is at fault."""
    text, status, param = _read(error)
    where = param or next((name for name, part in _parts(body) if _says(attempt, part) == text), None)
    said = plain(text)
    if where is not None and not said.startswith(where.split(".")[0]):
        said = f"{where}: {said[:1].lower()}{said[1:]}"
    return ApiError(status, said, param=where)


def _parts(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The request with less in it: one message or item of it, or one other field."""
    turns = "input" if "input" in body else "messages"
    given = body.get(turns)
    needed = {name: body[name] for name in ("model", "max_tokens") if isinstance(body.get(name), str | int)}
    hello = {"role": "user", "content": "hi"}
    for name, value in body.items():
        if name not in ("model", turns):
            yield name, {**needed, turns: [hello], name: value}
    if isinstance(given, list):
        for number, turn in enumerate(given[:_MOST_ATTEMPTS]):
            yield f"{turns}.{number}", {**needed, turns: [turn]}
    yield turns, {**needed, turns: given}


def _says(attempt: Attempt, part: dict[str, Any]) -> str | None:
    try:
        attempt(part)
    except (ConversionError, ValueError) as error:
        return _read(error)[0]
    return None


def _read(error: ConversionError | ValueError) -> tuple[str, int, str | None]:
    """Sentence, status and field: a ConversionError has them in a JSON body, a ValueError is the sentence."""
    if not isinstance(error, ConversionError):
        return str(error), 400, None
    try:
        detail = json.loads(error.body)["error"]
        return str(detail["message"]), error.status_code, detail.get("param")
    except (ValueError, KeyError, TypeError):
        return "the request cannot be converted for this model", error.status_code, None


def _given(text: str) -> str:
    return _short(_GIVEN.sub("", text).replace("`", ""))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
