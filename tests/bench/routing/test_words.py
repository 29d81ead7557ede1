from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vllm_deepinfer.bench.routing.words import (
    TEMPLATE,
    VOCABULARY,
    expected_words,
    prompt_ids,
    prompt_of,
    words_of,
    write_tokenizer,
)
from vllm_deepinfer.checkpoint.tokenizer import CONTROL_TOKENS, SMALLEST
from vllm_deepinfer.gateway.engines import vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, 4096)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_a_text_of_ascii_has_a_token_per_character(tokenizer: Tokenizer) -> None:
    for tokens in (5, 100, 3001):
        assert len(tokenizer.encode(prompt_of(7, tokens)).ids) == tokens - TEMPLATE


def test_ids_are_read_back_from_the_text(tokenizer: Tokenizer) -> None:
    ids = [SMALLEST, 1234, VOCABULARY - 1, 999, 999]
    assert words_of(tokenizer.decode(ids)) == ids


def test_a_digit_behind_a_word_is_not_taken_for_a_part_of_it(tokenizer: Tokenizer) -> None:
    digit = tokenizer.encode("7").ids
    assert words_of(tokenizer.decode([1234, *digit, 5678])) == [1234, 5678]


def test_a_simulated_engine_takes_the_vocabulary_from_it(folder: Path) -> None:
    assert vocabulary(folder)["vocab_size"] == VOCABULARY


def test_prompt_ids_are_what_the_gateways_template_makes_without_thinking() -> None:
    ids = prompt_ids(3, 50)
    assert len(ids) == 50
    names = [CONTROL_TOKENS[token][0] for token in (*ids[:2], *ids[-2:])]
    assert names == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"]


def test_prompts_of_a_session_begin_alike() -> None:
    assert prompt_of(3, 200).startswith(prompt_of(3, 100))
    assert prompt_of(3, 200)[:20] != prompt_of(4, 200)[:20]


def test_an_answer_is_nearly_all_words_and_depends_on_its_prompt() -> None:
    words = expected_words(3, 100, 400)
    assert 390 < len(words) <= 400
    assert all(SMALLEST <= word < VOCABULARY for word in words)
    assert words == expected_words(3, 100, 400) != expected_words(3, 101, 400)
    assert expected_words(3, 100, 40) == words[: len(expected_words(3, 100, 40))]
