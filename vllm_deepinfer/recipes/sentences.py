"""From pydantic's errors to sentences for the author of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm_deepinfer.recipes.schema import Recipe
from vllm_deepinfer.recipes.yaml_lines import Document, Path

_SAYS = {
    "int_type": "write a whole number",
    "int_from_float": "write a whole number",
    "float_type": "write a number",
    "finite_number": "write a finite number",
    "bool_type": "write true or false",
    "string_type": "write text, in quotes if it looks like a number",
    "dict_type": "write keys and values",
    "model_type": "write keys and values",
    "model_attributes_type": "write keys and values",
    "tuple_type": "write a list",
    "path_type": "write a path",
    "string_pattern_mismatch": "write at most 31 lower-case letters, digits and dashes, a letter first",
    "string_too_short": "write something there",
}


def sentences(error: ValidationError, document: Document) -> list[str]:
    """One sentence per fault, in the order of the file."""
    details = error.errors(include_url=False)
    meant = {_meant(detail["loc"]) for detail in details if detail["type"] == "extra_forbidden"}
    told = [detail for detail in details if detail["type"] != "missing" or detail["loc"] not in meant]
    told.sort(key=lambda detail: document.line(_path(detail["loc"])) or 0)
    return [_sentence(detail, document) for detail in told]


def _meant(path: Path) -> Path:
    """The path that an unknown key was probably meant to be: nobody is told that this one is missing."""
    near = get_close_matches(str(path[-1]), keys_at(path[:-1]), n=1)
    return (*path[:-1], *near)


def _path(loc: Path) -> Path:
    return tuple(part for part in loc if part != "[key]")


def _sentence(detail: Any, document: Document) -> str:
    path = _path(detail["loc"])
    where = _where(path, document)
    if detail["type"] == "extra_forbidden":
        known = keys_at(path[:-1])
        return f"{where} is no key of a recipe{nearest(str(path[-1]), known)}"
    if detail["type"] == "missing":
        return f"{where} is missing: {_missing(path)}."
    told = _SAYS.get(detail["type"]) or _lower(detail["msg"])
    if path[-1:] == ("replicas",):
        told = "write a whole number, or {min, max, initial}"
    return f"{where} is {short(detail['input'])}: {told}."


def nearest(word: str, known: Sequence[str]) -> str:
    """The end of a sentence: `: did you mean …?`, or the list of what is known."""
    near = get_close_matches(word, known, n=1)
    if near:
        return f": did you mean {near[0]}?"
    listed = ", ".join(known)
    return f": the keys here are {listed}." if listed and len(listed) <= 300 else "."


def keys_at(path: Path) -> list[str]:
    """The keys that the schema knows at a path; empty where keys are free."""
    part: Any = Recipe
    for step in path:
        fields = _fields(part)
        if fields:
            part = fields[str(step)].annotation if str(step) in fields else None
        else:  # a map or list of parts: the step is a name or position
            part = next((found for found in _parts(part)), None)
    return list(_fields(part))


def _fields(part: Any) -> Mapping[str, Any]:
    """Fields of a part, also of one behind `| None`; empty for a map or list of parts."""
    if isinstance(part, type) and issubclass(part, BaseModel):
        return part.model_fields
    args = getattr(part, "__args__", ())
    if type(None) in args:
        return _fields(next((found for found in args if found is not type(None)), None))
    return {}


def _parts(annotation: Any) -> Iterator[Any]:
    for found in getattr(annotation, "__args__", ()):
        if isinstance(found, type) and issubclass(found, BaseModel):
            yield found
        yield from _parts(found)


def _where(path: Path, document: Document) -> str:
    line = document.line(path)
    dotted = ".".join(map(str, path)) or "the recipe"
    return dotted if line is None else f"line {line}: {dotted}"


def _missing(path: Path) -> str:
    examples = {"role": "write prefill, decode or aggregated", "name": "write the deployment's name"}
    return examples.get(str(path[-1]), "write it")


def _lower(text: str) -> str:
    return f"{text[:1].lower()}{text[1:]}"


def short(value: object) -> str:
    """A value as the author wrote it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
