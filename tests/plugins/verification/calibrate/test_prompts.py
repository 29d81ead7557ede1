"""Prompts from a file or from held-out lessons, and one sentence for a line that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from vllm_deepinfer_plugins.verification.calibrate.prompts import from_file, lessons

from vllm_deepinfer.checkpoint.tokenizer import small_tokenizer
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.lessons.stream import documents
from vllm_deepinfer.lessons.vocabulary import tokenizer

VOCABULARY = 2048


def read(path: Path, *lines: object, longest: int = 8) -> list[list[int]]:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return from_file(path, tokenizer(), VOCABULARY, longest)


def test_ids_and_texts_in_an_object_or_bare(tmp_path: Path) -> None:
    ids = tokenizer().encode("def f").ids
    lines: list[object] = [{"prompt_token_ids": [5, 17]}, "", {"prompt": "def f"}, [3], '"def f"', "  "]
    assert read(tmp_path / "p.jsonl", *lines) == [[5, 17], ids, [3], ids]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    """JSON may hold U+2028 as it is, and str.splitlines would cut there."""
    [prompt] = read(tmp_path / "p.jsonl", '"a\u2028b"')
    assert prompt == tokenizer().encode("a\u2028b").ids


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("{", "is not JSON ("),
        ({"text": "x"}, "has no prompt: write "),
        ({"prompt": "x", "prompt_token_ids": [1]}, "has prompt_token_ids and prompt: write "),
        (5, "is neither a text nor a list of token ids: write "),
        ([1, True], "is neither a text nor a list of token ids"),
        ([1, 2.0], "is neither a text nor a list of token ids"),
        ([1, 2048], "the token id 2048 is not below the vocabulary's size, 2048"),
        ([-1], "the token id -1 is not below"),
        ([], "the prompt has 0 tokens; it may have 1 to 8"),
        ([1] * 9, "the prompt has 9 tokens"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, wanted: str) -> None:
    path = tmp_path / "p.jsonl"
    with pytest.raises(UserError) as error:
        read(path, [5], line)
    assert str(error.value).startswith(f"--prompts {path}, line 2") and wanted in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"p\.jsonl has no line: write"):
        read(tmp_path / "p.jsonl", "")
    with pytest.raises(UserError, match=r"cannot be read \(No such file or directory\)"):
        from_file(tmp_path / "none", tokenizer(), VOCABULARY, 8)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UserError, match="it is no text"):
        from_file(tmp_path / "bytes", tokenizer(), VOCABULARY, 8)


def test_lessons_end_where_the_answer_begins() -> None:
    found = lessons(tokenizer(), 80, longest=600)
    assert len(found) == 80 and all(0 < len(prompt) <= 600 for prompt in found)
    stream = documents(0, "heldout", tokenizer())
    kinds = set()
    for prompt in found:
        document = next(
            d for d in stream if d.tokens[: len(prompt)] == prompt and len(d.tokens) > len(prompt)
        )
        kinds.add(document.kind)
        if document.kind not in ("code", "prose"):
            assert document.mask.index(True) == len(prompt)
        else:
            assert len(prompt) == len(document.tokens) // 2
    assert kinds >= {"code", "prose", "tools", "retrieval"}
    assert found == lessons(tokenizer(), 80, longest=600), "the same on every run"


def test_a_vocabulary_without_the_control_tokens() -> None:
    plain = json.loads(small_tokenizer(512).to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] != "<｜Assistant｜>"]
    with pytest.raises(UserError, match=r"lacks the control token .*Assistant.*give --prompts FILE"):
        lessons(Tokenizer.from_str(json.dumps(plain)), 4, 600)
