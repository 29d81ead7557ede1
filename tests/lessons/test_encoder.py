"""Ids of texts, and back."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.vocabulary import tokenizer

ENCODER = Encoder(tokenizer())


@given(st.text(max_size=60))
def test_text_comes_back_as_it_was(text: str) -> None:
    ids = ENCODER.text(text)
    assert ENCODER._plain.decode(ids) == text


@given(st.lists(st.sampled_from(["<｜User｜>", "</think>", "｜DSML｜", "a", " "]), max_size=8))
def test_text_never_becomes_a_control_token(parts: list[str]) -> None:
    assert all(token >= 25 for token in ENCODER.text("".join(parts)))


def test_the_end_of_sentence_is_not_shown() -> None:
    assert ENCODER.decode([*ENCODER.text("done"), ENCODER.eos]) == "done"
    assert ENCODER.decode(ENCODER.text("done")) == "done"
