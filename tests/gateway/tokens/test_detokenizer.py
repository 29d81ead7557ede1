import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.tokens.conftest import Oracle, TokenizerFile
from vllm_deepinfer.gateway.tokens.detokenizer import Detokenizer
from vllm_deepinfer.gateway.tokens.errors import TokenizerError
from vllm_deepinfer.gateway.tokens.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def table(deepseek: TokenizerFile) -> Detokenizer:
    return Detokenizer(Vocabulary(deepseek.parsed))


def feed(table: Detokenizer, ids: list[int], sizes: list[int], skip: bool = False) -> list[str]:
    stream, deltas, start = table.stream(skip), [], 0
    for size in [*sizes, len(ids)]:
        deltas.append(stream.push(ids[start : start + size]))
        start += size
    return [*deltas, stream.finish()]


IDS = st.lists(st.integers(0, 127_999) | st.integers(3, 260) | st.integers(128_800, 128_846), max_size=30)
SIZES = st.lists(st.integers(0, 4), max_size=40)


@given(ids=IDS, sizes=SIZES, skip=st.booleans())
def test_a_stream_adds_up_to_the_whole(
    table: Detokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    assert "".join(feed(table, ids, sizes, skip)) == table.decode(ids, skip)


@given(ids=IDS)
def test_the_whole_is_what_the_tokenizer_says(
    table: Detokenizer, full_oracle: Oracle, ids: list[int]
) -> None:
    assert table.decode(ids) == full_oracle.decode(ids)


@given(text=st.text(max_size=40))
def test_round_trip(table: Detokenizer, oracle: Oracle, text: str) -> None:
    ids = oracle.ids(text)
    assert table.decode(ids) == text
    assert "".join(feed(table, ids, [1] * len(ids))) == text


@given(text=st.text(st.sampled_from("a中👨‍👩‍👧é\u0301 "), max_size=20))
def test_no_delta_shows_half_a_character(table: Detokenizer, oracle: Oracle, text: str) -> None:
    ids = oracle.ids(text)
    assert not any("\ufffd" in delta for delta in feed(table, ids, [1] * len(ids)))


def by_bytes(table: Detokenizer, text: str) -> list[int]:
    return [table.bytes_of.index(bytes([byte])) for byte in text.encode()]


def test_a_character_is_held_back_until_it_is_whole(table: Detokenizer) -> None:
    assert feed(table, by_bytes(table, "a中b"), [1] * 5) == ["a", "", "", "中", "b", "", ""]


def test_half_a_character_at_the_end_is_replaced(table: Detokenizer) -> None:
    half = by_bytes(table, "a中")[:-1]
    assert feed(table, half, [1] * 3) == ["a", "", "", "", "\ufffd"]


def test_a_control_token_ends_half_a_character(table: Detokenizer) -> None:
    end_think = 128822
    ids = [*by_bytes(table, "中")[:2], end_think, *by_bytes(table, "x")]
    assert "".join(feed(table, ids, [1] * 4)) == "\ufffd</think>x"
    assert "".join(feed(table, ids, [4])) == "\ufffd</think>x"


def test_control_tokens_are_spelled_or_skipped(table: Detokenizer) -> None:
    ids = [128821, *by_bytes(table, "hm"), 128822, 1]
    assert table.decode(ids) == "<think>hm</think><｜end▁of▁sentence｜>"
    assert table.decode(ids, skip_control=True) == "hm"
    assert "".join(feed(table, ids, [1] * 5, skip=True)) == "hm"


def test_an_unknown_id_is_refused_in_a_request_and_shown_in_a_stream(table: Detokenizer) -> None:
    size = len(table.bytes_of)
    for bad in (size, -1, 10**9):
        with pytest.raises(TokenizerError, match=f"Token id {bad} is not in the vocabulary"):
            table.decode([5, bad])
    assert feed(table, [*by_bytes(table, "a"), size, *by_bytes(table, "b")], [3]) == ["a\ufffdb", "", ""]
    assert feed(table, [*by_bytes(table, "中")[:2], size], [3]) == ["\ufffd\ufffd", "", ""]


def test_the_tables_of_text_in_json(table: Detokenizer) -> None:
    def token(text: str) -> int:
        return table.text_of.index(text)

    newline, quote, angle, word = token("\n"), token('"'), token("<"), token(" the")
    assert table.json_of[word] == table.plain_of[word] == b" the"
    assert table.json_of[quote] == table.plain_of[quote] == b'\\"'
    assert table.json_of[newline] == b"\\n" and table.plain_of[newline] is None
    assert table.json_of[angle] is None and table.plain_of[angle] is None
    for control in table.control:
        assert table.json_of[control] is None and table.plain_of[control] is None


def test_plain_text_without_the_tokens_that_end_an_answer(table: Detokenizer) -> None:
    plain = next(token for token, text in enumerate(table.plain_of) if text is not None)
    without = table.plain_without(frozenset({plain}))
    assert without[plain] is None and len(without) == len(table.plain_of)
    assert [t for t, text in enumerate(table.plain_of) if without[t] != text] == [plain]
    assert table.plain_without(frozenset({plain})) is without  # made once
    assert table.plain_without(frozenset()) == table.plain_of
    assert table.plain_without(frozenset(), line_ends=True) == table.json_of
