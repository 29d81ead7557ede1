from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.gateway.tokens.conftest import Oracle, TokenizerFile
from vllm_deepinfer.gateway.tokens.errors import TokenizerError
from vllm_deepinfer.gateway.tokens.vocabulary import Vocabulary, byte_alphabet, plain_json


def vocabulary(file: TokenizerFile) -> Vocabulary:
    return Vocabulary(file.parsed)


def test_the_alphabet_is_the_one_of_the_tokenizers_package() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(ByteLevel.alphabet())
    assert (table["A"], table["Ġ"], table["Ċ"], table["é"]) == (65, 32, 10, 0xE9)


def test_control_tokens_are_all_added_tokens(deepseek: TokenizerFile) -> None:
    control = vocabulary(deepseek).control_ids
    assert len(control) == 1283
    assert control["<｜begin▁of▁sentence｜>"] == 0
    assert control["<｜User｜>"] == 128803  # not flagged special
    assert control["｜DSML｜"] == 128825
    assert control["<｜System｜>"] == 128000


def test_the_plain_tokenizer_has_none_of_them(deepseek: TokenizerFile) -> None:
    control = vocabulary(deepseek).control_ids
    plain = Tokenizer.from_str(plain_json(deepseek.parsed))
    assert plain.get_added_tokens_decoder() == {}
    for spelling, token in control.items():
        assert token not in plain.encode(spelling).ids


def test_bytes_of_tokens(tiny: TokenizerFile) -> None:
    table = vocabulary(tiny).token_bytes
    assert len(table) == 261
    assert table[257] == b"the"
    assert table[258] == "<｜User｜>".encode()
    assert set(table[:256]) == {bytes([byte]) for byte in range(256)}


def test_ids_that_name_no_token_have_no_bytes(tiny: TokenizerFile) -> None:
    table = vocabulary(tiny.changed("added_tokens", 0, "id", to=300)).token_bytes
    assert (len(table), table[258], table[299]) == (301, None, None)


@pytest.fixture(scope="module")
def table(deepseek: TokenizerFile) -> list[bytes | None]:
    return vocabulary(deepseek).token_bytes


@given(ids=st.lists(st.integers(0, 129_279), max_size=20))
def test_bytes_agree_with_decode(table: list[bytes | None], full_oracle: Oracle, ids: list[int]) -> None:
    known = [token for token in ids if table[token] is not None]
    text = b"".join(table[token] or b"" for token in known).decode(errors="replace")
    assert full_oracle.decode(known) == text


def test_require(tiny: TokenizerFile) -> None:
    vocabulary(tiny).require(["<think>", "<｜User｜>"])
    with pytest.raises(
        TokenizerError, match=r"no control token <｜System｜>, which the model's prompt template"
    ):
        vocabulary(tiny).require(["<think>", "<｜System｜>"])


def control(tiny: TokenizerFile, token: int, content: str) -> list[dict[str, Any]]:
    tokens: list[dict[str, Any]] = tiny.parsed["added_tokens"]
    return [*tokens, tokens[0] | {"id": token, "content": content}]


def test_a_control_token_that_merges_can_reach_is_refused(tiny: TokenizerFile) -> None:
    with pytest.raises(TokenizerError, match=r"encoded to the control token the \(id 257\)"):
        vocabulary(tiny.changed("added_tokens", to=control(tiny, 257, "the")))


def test_a_control_token_in_the_vocabulary_is_fine_while_no_merge_reaches_it(tiny: TokenizerFile) -> None:
    listed = tiny.changed("model", "vocab", "<think>", to=259)
    assert vocabulary(listed).control_ids["<think>"] == 259
    with pytest.raises(TokenizerError, match="<think>"):  # now a whole piece may be looked up
        vocabulary(listed.changed("model", "ignore_merges", to=True))


def test_merges_may_be_pairs(tiny: TokenizerFile) -> None:
    pairs = tiny.changed("model", "merges", to=[["t", "h"], ["th", "e"]])
    assert vocabulary(pairs).control_ids == vocabulary(tiny).control_ids
    with pytest.raises(TokenizerError, match="id 256"):
        vocabulary(pairs.changed("added_tokens", to=control(tiny, 256, "th")))


def test_an_unknown_token_is_reachable(tiny: TokenizerFile) -> None:
    listed = tiny.changed("model", "vocab", "<think>", to=259)
    with pytest.raises(TokenizerError, match="id 259"):
        vocabulary(listed.changed("model", "unk_token", to="<think>"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pre_tokenizer", None),
        ("pre_tokenizer", {"type": "Metaspace"}),
        ("model", {"type": "Unigram", "vocab": []}),
    ],
)
def test_other_kinds_are_refused(tiny: TokenizerFile, key: str, value: Any) -> None:
    with pytest.raises(TokenizerError, match="only byte-level BPE"):
        vocabulary(tiny.changed(key, to=value))
