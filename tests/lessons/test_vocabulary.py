"""The committed tokenizer, and that learning it is repeatable."""

import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from vllm_deepinfer.checkpoint.tokenizer import CONTROL_TOKENS, small_tokenizer
from vllm_deepinfer.gateway.tokens import PromptTokenizer
from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.vocabulary import SIZE, learn, lesson_texts, tokenizer
from vllm_deepinfer.lessons.words import KEYS, WORDS


@cache
def parsed() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(tokenizer().to_str())
    return document


def learnt(size: int) -> str:
    """From a text that is no lesson: lessons change, how tokens are learnt does not."""
    text = (files("vllm_deepinfer.checkpoint") / "data" / "corpus.txt").read_text(encoding="utf-8")
    return learn(iter([text]), size).to_str()


def test_the_committed_bytes() -> None:
    digest = hashlib.sha256(tokenizer().to_str().encode()).hexdigest()
    assert digest == "3fc63cf54d8f7c453b81d7bdaa577111f1e1b2abe0ab330cbe9938d942c0de37"


def test_learning_twice_gives_the_same_bytes() -> None:
    assert learnt(600) == learnt(600)
    digest = hashlib.sha256(learnt(600).encode()).hexdigest()
    assert digest == "0a963417357c519afa5225a662e0fdd25d77b8ff73c42174711aac515de3dd8c"


def test_what_it_is_learnt_from_holds_no_control_tokens() -> None:
    texts = list(lesson_texts(2))
    assert any("code" in text for text in texts)
    assert not any(control in text for text in texts for control, _ in CONTROL_TOKENS[:8])


def test_it_is_the_small_tokenizer_with_other_merges() -> None:
    ours, small = parsed(), json.loads(small_tokenizer().to_str())
    for part in ("added_tokens", "pre_tokenizer", "decoder", "post_processor", "normalizer"):
        assert ours[part] == small[part]
    assert len(ours["model"]["vocab"]) == SIZE == 2048
    assert [token["content"] for token in ours["added_tokens"]] == [text for text, _ in CONTROL_TOKENS]


def test_digits_stand_alone() -> None:
    digits = set("0123456789")
    assert all(len(token) == 1 or not digits & set(token) for token in parsed()["model"]["vocab"])
    assert len(Encoder(tokenizer()).text("1234567890")) == 10


def test_keys_and_values_are_one_token_each() -> None:
    encoder = Encoder(tokenizer())
    assert all(len(encoder.text(word)) == len(encoder.text(f" {word}")) == 1 for word in KEYS)
    assert all(len(encoder.text(f" {word}")) == 1 for word in WORDS)
    assert len(encoder.text("code: blue")) == 3


def test_the_gateway_takes_it_and_cuts_long_prompts() -> None:
    served = PromptTokenizer(tokenizer().to_str(), threads=1)
    assert served.parallel
    served.require(text for text, _ in CONTROL_TOKENS)
