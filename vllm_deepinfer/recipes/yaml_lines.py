"""YAML that remembers where each key stands and refuses a key that is there twice."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and list positions that lead to a value."""

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_MOST_NODES = 100_000  # aliases of aliases would fill the memory from a few lines
_JSON_TAGS = {"bool", "float", "int", "map", "null", "seq", "str"}


@dataclass(frozen=True)
class Document:
    """Attributes:
    value: maps with string keys, lists, strings, numbers, truth values and None: what JSON can say.
    lines: the 1-based line of the key or list entry at each path.
    faults: one clause each, with its line; `value` lacks what they are about.
    """

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def line(self, path: Path) -> int | None:
        """Line of the value at this path, or of the nearest that encloses it."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return None


def parse(text: str) -> Document:
    """Read one YAML document.

    Raises:
        ValueError: The text is no YAML; the message is a clause that names the line.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)  # which refuses control characters already
        node = loader.get_single_node()
        reader = _Reader(loader)
        value = None if node is None else reader.read(node, ())
    except yaml.YAMLError as error:
        raise ValueError(_clause(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()
    return Document(value, reader.lines, tuple(reader.faults))


class _Reader:
    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._open: set[int] = set()
        self._nodes = 0
        self.lines: dict[Path, int] = {}
        self.faults: list[str] = []

    def read(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        if id(node) in self._open or self._nodes > _MOST_NODES:
            problem = "an alias contains itself" if id(node) in self._open else "it is too large"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._at(child, (*path, index)) for index, child in enumerate(node.value)]
            assert isinstance(node, yaml.ScalarNode)
            return self._scalar(node)
        finally:
            self._open.discard(id(node))

    def _at(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        return self.read(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is no word", key.start_mark)
            line = key.start_mark.line + 1
            if key.value in first:
                again = (
                    f"line {line} has the key {key.value} again, first on line {first[key.value]}: drop one"
                )
                self.faults.append(again)
            first.setdefault(key.value, line)
        self._loader.flatten_mapping(node)  # `<<: *others` becomes their keys, in front of the node's own
        for key, _ in node.value:
            self.lines[(*path, str(key.value))] = first.get(key.value, key.start_mark.line + 1)
        return {str(key.value): self.read(child, (*path, str(key.value))) for key, child in node.value}

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        if node.tag.endswith(":str") and node.style is None and _EXPONENT.fullmatch(text):
            return float(text)  # YAML 1.1 wants a point in it and takes 1e-5 for text
        if node.tag.rsplit(":", 1)[-1] not in _JSON_TAGS:  # a date, bytes, or a tag of the writer's own
            return text
        if node.tag.endswith(":int") and ":" in text:  # YAML 1.1 takes 1:30 for 90
            return text
        try:
            return self._loader.construct_object(node)
        except (ValueError, KeyError):  # `!!int x`
            kind = node.tag.rsplit(":", 1)[-1]
            raise yaml.constructor.ConstructorError(
                None, None, f"this is no {kind}", node.start_mark
            ) from None


def _clause(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem
