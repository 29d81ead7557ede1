"""The standard library as code and prose."""

import ast

from vllm_deepinfer.lessons import corpus

SOURCE = '''"""Head."""
import os


class Thing:
    """One thing.

    It has two lines.
    """

    def only(self):
        """Says nothing else."""

    def value(self):
        """A value."""
        return """not a docstring"""
'''


def test_docstrings_leave_the_code_and_it_is_python_still() -> None:
    code, prose = corpus.separated(SOURCE)
    assert prose == "Head.\n\nOne thing.\n\nIt has two lines.\n\nSays nothing else.\n\nA value.\n"
    assert '"""not a docstring"""' in code
    assert "Head" not in code and "One thing" not in code
    tree = ast.parse(code)
    thing = tree.body[1]
    assert isinstance(thing, ast.ClassDef)
    assert [
        type(statement.body[0]) for statement in thing.body if isinstance(statement, ast.FunctionDef)
    ] == [
        ast.Pass,
        ast.Return,
    ]


def test_modules_are_on_one_side() -> None:
    train = {piece.module for piece in corpus.code("train")} | {
        piece.module for piece in corpus.prose("train")
    }
    heldout = {piece.module for piece in corpus.code("heldout")}
    assert not train & heldout
    assert {"csv", "doctest", "http.client", "urllib.request"} <= heldout
    assert {"json.decoder", "argparse", "random"} <= train
    assert not any(name.startswith(("test.", "idlelib")) for name in train | heldout)


def test_pieces_are_whole_lines_and_add_up() -> None:
    pieces = [piece for piece in corpus.code("heldout") if piece.module == "doctest"]
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.text.endswith("\n") for piece in pieces)
    assert all(len(piece.text) <= corpus.CHUNK_CHARS for piece in pieces)
    ast.parse("".join(piece.text for piece in pieces))


def test_there_is_enough_of_it() -> None:
    sizes = {split: sum(len(piece.text) for piece in corpus.code(split)) for split in ("train", "heldout")}
    assert sizes["train"] > 4_000_000
    assert 0.02 < sizes["heldout"] / sizes["train"] < 0.12
