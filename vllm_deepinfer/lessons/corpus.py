"""Code and prose that every machine with Python has under a free licence: the standard library.

Code is the source without docstrings; prose is the docstrings. A module is on one side
of the split as a whole.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .split import Split, side_of
from .words import words

# Tests, tables of characters, what later versions lack, and what a distribution may leave out.
LEFT_OUT = frozenset(
    words(
        """
        test tests idlelib lib2to3 turtledemo site-packages dist-packages ensurepip distutils encodings
        pydoc_data __pycache__ tkinter msilib __phello__
        """
    )
)
CHUNK_CHARS = 2400  # about 800 tokens
MOST_DIGITS = 0.15  # of all characters: tables
LONGEST_LINE = 400  # generated files
HELDOUT_PERCENT = 6


@dataclass(frozen=True)
class Piece:
    """Part of a module: whole lines, in the order of the file. ``last``: nothing follows it."""

    module: str
    text: str
    last: bool


@cache
def code(split: Split) -> tuple[Piece, ...]:
    """Pieces of source, by module."""
    return tuple(piece for name, parts in _modules(split) for piece in _pieces(name, parts[0]))


@cache
def prose(split: Split) -> tuple[Piece, ...]:
    """Pieces of documentation, by module."""
    return tuple(piece for name, parts in _modules(split) for piece in _pieces(name, parts[1]))


@cache
def _modules(split: Split) -> tuple[tuple[str, tuple[str, str]], ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts)
        if LEFT_OUT.isdisjoint(parts) and side_of(f"module:{name}", HELDOUT_PERCENT) == split:
            try:
                source = path.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(8)
                if _is_written_by_people(source):
                    found.append((name, separated(source)))
            except (OSError, UnicodeDecodeError, SyntaxError):
                continue  # what is there differs between machines
    return tuple(found)


def separated(source: str) -> tuple[str, str]:
    """Source without docstrings, and the docstrings as paragraphs.

    Raises:
        SyntaxError: It is not Python of this version.
    """
    lines = source.split("\n")
    documents = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is None:
            continue
        first = node.body[0]
        assert first.end_lineno is not None
        documents.append((first.lineno, inspect.cleandoc(text)))
        blank: list[str | None] = [None] * (first.end_lineno - first.lineno + 1)
        if len(node.body) == 1:
            blank[0] = " " * first.col_offset + "pass"
        lines[first.lineno - 1 : first.end_lineno] = blank  # type: ignore[assignment]
    kept = "\n".join(line.rstrip() for line in lines if line is not None)
    return kept.strip("\n") + "\n", "\n\n".join(text for _, text in sorted(documents) if text) + "\n"


def _is_written_by_people(source: str) -> bool:
    digits = sum(map(source.count, "0123456789"))
    return (
        len(source) > 200
        and digits < MOST_DIGITS * len(source)
        and max(map(len, source.split("\n"))) <= LONGEST_LINE
        and source.isascii()
    )


def _pieces(module: str, text: str) -> Iterator[Piece]:
    """Cut at the first line that goes beyond the limit."""
    if not text.strip():
        return
    taken: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if size + len(line) > CHUNK_CHARS and taken:
            yield Piece(module, "".join(taken), False)
            taken, size = [], 0
        taken.append(line)
        size += len(line)
    yield Piece(module, "".join(taken), True)
