from __future__ import annotations

import json
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from vllm_deepinfer.checkpoint.config import ConfigError
from vllm_deepinfer.checkpoint.engram import EngramHash, compressed_token_map
from vllm_deepinfer.checkpoint.tokenizer import CONTROL_TOKENS, small_tokenizer

from .samples import DATA, released, sentence, text_config

GOLDEN: dict[str, dict[str, Any]] = json.loads((DATA / "engram_rows.json").read_text())["cases"]
FOUR_GRAMS = {"engram_layer_ids": [1, 5], "engram_num_embeddings": [5000, 5000], "engram_max_ngram_size": 4}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DATA / "tiny-tokenizer.json"))


@pytest.fixture(scope="module")
def four_grams(tokenizer: Tokenizer) -> EngramHash:
    return EngramHash.build(text_config("tiny", **FOUR_GRAMS), tokenizer)


def with_words(*words: str) -> Tokenizer:
    """A tokenizer whose decoder returns each entry as it is spelt."""
    document: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(
            ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
        ),
        "added_tokens": [],
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": "",
        },
    }
    return Tokenizer.from_str(json.dumps(document))


def test_compressed_size_of_the_fixture(tokenizer: Tokenizer) -> None:
    token_map, size = compressed_token_map(tokenizer)
    assert (token_map.dtype.name, token_map.shape, size) == ("int64", (512,), 420)
    assert sorted(set(token_map.tolist())) == list(range(420))


def test_compressed_size_of_the_released_vocabulary() -> None:
    token_map, size = compressed_token_map(released())
    assert (len(token_map), size) == (129_280, 99_092)


def test_ids_are_numbered_by_first_appearance(tokenizer: Tokenizer) -> None:
    token_map, _ = compressed_token_map(tokenizer)
    highest = -1
    for compressed in token_map.tolist():
        assert compressed <= highest + 1
        highest = max(highest, compressed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((" The", "the", "THE", "tHé", "then"), [0, 0, 0, 0, 1]),  # case, accents, spaces around
        (
            ("ﬁne", "fine", "ＦＩＮＥ", "fin e"),
            [0, 0, 0, 1],
        ),  # ligatures and full width, but not a space within
        ((" ", "\n", "\t \r\n", "x"), [0, 0, 0, 1]),  # any run of white space counts as one space,
        (("a\n\nb", "a b", "ab"), [0, 0, 1]),  # within words too,
        (("\u00a0x", "x", "\u2003"), [0, 0, 1]),  # and wide spaces are trimmed from the ends
        (("\u0301", "\u0300", "e"), [0, 1, 2]),  # an accent alone would vanish, so it keeps its spelling
    ],
)
def test_normalisation(words: tuple[str, ...], expected: list[int]) -> None:
    token_map, size = compressed_token_map(with_words(*words))
    assert token_map.tolist() == expected
    assert size == len(set(expected))


def test_parts_of_characters_stay_apart() -> None:
    """Byte tokens decode to the replacement character and must not all become one."""
    tokenizer = small_tokenizer(300)
    token_map, _ = compressed_token_map(tokenizer)
    partial = [token for token in range(300) if "\ufffd" in tokenizer.decode([token])]
    assert len(partial) > 100
    assert len({int(token_map[token]) for token in partial}) == len(partial)


@given(
    st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=6))
)
def test_words_that_differ_in_case_alone_share_an_id(words: list[str]) -> None:
    plain = [word for word in words if word.isascii()]
    unique = list(dict.fromkeys(variant for word in plain for variant in (word, word.upper(), f" {word} ")))
    token_map, size = compressed_token_map(with_words(*unique, "\u0000"))
    by_hand = {variant: unicodedata.normalize("NFKC", variant).strip().lower() for variant in unique}
    for first, token in zip(unique, token_map.tolist(), strict=False):
        for second, other in zip(unique, token_map.tolist(), strict=False):
            assert (token == other) == (by_hand[first] == by_hand[second])
    assert size == len(set(by_hand.values())) + 1


@pytest.mark.parametrize("case", ["fixture", "four_grams"])
def test_rows_of_another_implementation(case: str, tokenizer: Tokenizer) -> None:
    golden = GOLDEN[case]
    hashing = EngramHash.build(text_config("tiny", **(FOUR_GRAMS if case == "four_grams" else {})), tokenizer)
    assert hashing.primes.tolist() == golden["primes"]
    assert hashing.multipliers.tolist() == golden["multipliers"]
    assert hashing.pad_id == golden["pad_id"]
    assert hashing.rows(np.array(golden["ids"])).tolist() == golden["rows"]


def test_rows_of_another_implementation_around_images(four_grams: EngramHash) -> None:
    golden = GOLDEN["dead_tokens"]
    ids = np.array(golden["ids"])
    dead = np.isin(np.arange(len(ids)), golden["dead"])
    assert four_grams.rows(ids, dead=dead).tolist() == golden["rows"]


def by_definition(hashing: EngramHash, ids: list[int], dead: list[bool]) -> list[list[list[int]]]:
    """Token by token in Python integers."""
    heads = hashing.heads
    rows = []
    for position in range(len(ids)):
        look, reached = [], True
        for distance in range(hashing.max_ngram):
            at = position - distance
            reached = reached and at >= 0 and not dead[at]
            look.append(int(hashing.token_map[ids[at]]) if reached else hashing.pad_id)
        layers = []
        for layer in range(len(hashing.primes)):
            columns = []
            for column, prime in enumerate(hashing.primes[layer].tolist()):
                size = 2 + column // heads
                mixed = 0
                for distance in range(size):
                    mixed ^= look[distance] * int(hashing.multipliers[layer, distance])
                columns.append(mixed % prime + int(hashing.primes[layer, :column].sum()))
            layers.append(columns)
        rows.append(layers)
    return rows


@settings(max_examples=50)
@given(data=st.data(), ids=st.lists(st.integers(0, 511), min_size=1, max_size=12))
def test_rows_like_the_definition(four_grams: EngramHash, data: st.DataObject, ids: list[int]) -> None:
    dead = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    rows = four_grams.rows(np.array(ids), dead=np.array(dead))
    assert rows.dtype == np.int64
    assert rows.tolist() == by_definition(four_grams, ids, dead)


@given(
    ids=st.lists(st.integers(0, 511), min_size=4, max_size=20),
    cut=st.integers(0, 20),
    earlier=st.integers(0, 511),
)
def test_three_tokens_are_the_whole_state(
    four_grams: EngramHash, ids: list[int], cut: int, earlier: int
) -> None:
    """What a cached run may carry over from one chunk to the next."""
    start = min(cut, len(ids) - 1)
    lookback = four_grams.max_ngram - 1
    assert lookback == 3
    whole = four_grams.rows(np.array([earlier, *ids]))[1 + start :]
    tail = four_grams.rows(np.array([earlier, *ids])[max(0, 1 + start - lookback) :])
    assert whole.tolist() == tail[len(tail) - len(whole) :].tolist()


def test_rows_stay_within_their_buckets(four_grams: EngramHash) -> None:
    rows = four_grams.rows(np.random.default_rng(0).integers(0, 512, 4000))
    assert (rows >= four_grams.offsets).all()
    assert (rows < four_grams.offsets + four_grams.primes).all()
    assert len(np.unique(rows[:, 0, 0])) == four_grams.primes[0, 0]  # every bucket is reached


def test_an_empty_sequence(four_grams: EngramHash) -> None:
    assert four_grams.rows(np.array([], dtype=np.int64)).shape == (0, 2, 6)


def test_multipliers_are_odd_and_their_products_fit(four_grams: EngramHash) -> None:
    multipliers = four_grams.multipliers.astype(object)
    assert all(value % 2 == 1 for value in multipliers.ravel())
    assert multipliers.max() * (420 - 1) < 2**63


def test_ids_without_text_hash_as_the_pad(tokenizer: Tokenizer) -> None:
    hashing = EngramHash.build(text_config("tiny", vocab_size=520), tokenizer)
    assert len(hashing.token_map) == 520
    assert set(hashing.token_map[512:].tolist()) == {hashing.pad_id}
    assert hashing.pad_id == 2


def refused(tokenizer: Tokenizer, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EngramHash.build(text_config("tiny", **changes), tokenizer)
    return sentence(caught.value)


def test_another_tokenizer_is_refused_by_both_numbers() -> None:
    message = refused(small_tokenizer(512))
    assert message.startswith(
        "text_config.engram_compressed_vocab_size is 420, but the tokenizer's ids compress to "
    )
    assert str(compressed_token_map(small_tokenizer(512))[1]) in message


def test_a_tokenizer_beyond_the_embedding(tokenizer: Tokenizer) -> None:
    message = refused(tokenizer, vocab_size=500)
    assert message.startswith("text_config.vocab_size is 500, but the tokenizer has 512 ids: ")


def test_a_pad_token_that_the_tokenizer_lacks(tokenizer: Tokenizer) -> None:
    message = refused(tokenizer, vocab_size=600, engram_pad_token_id=550)
    assert message.startswith("text_config.engram_pad_token_id is 550, but the tokenizer has only 512 ids: ")


def test_no_engram_layer(tokenizer: Tokenizer) -> None:
    message = refused(tokenizer, engram_layer_ids=[], engram_num_embeddings=[])
    assert message.startswith("text_config.engram_layer_ids is empty: ")


def test_control_tokens_have_ids_of_their_own() -> None:
    token_map, _ = compressed_token_map(small_tokenizer())
    control = token_map[: len(CONTROL_TOKENS)].tolist()
    assert control == list(range(len(CONTROL_TOKENS)))
