"""The cuts against the pre-tokenizer itself: every short text over one character of each class, and random
long ones.
"""

import itertools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.tokens.conftest import Oracle, TokenizerFile
from vllm_deepinfer.gateway.tokens.boundaries import DEEPSEEK, GPT2, BoundaryRule, cut, rule_for

# One or more characters of every class that an expression tells apart, and the awkward ones near their edges.
LETTERS = ["a", "Z", "é", "я", "한", "\u0301", "\u20dd"]
CJK = ["中", "龥", "\u9fa6", "ア", "ー", "゛", "\u3040"]
DIGITS = ["1", "٣", "①", "Ⅷ"]
SIGNS = [".", "'", "$", "，", "€", "～", "😀", "\u200d", "\ufe0f"]
BLANKS = [" ", "\n", "\r", "\t", "\u00a0", "\u0085", "\u2028", "\u3000", "\u180e", "\u200b", "\x1c", "\x00"]
ALPHABET = LETTERS + CJK + DIGITS + SIGNS + BLANKS
TRICKY = st.text(st.sampled_from(ALPHABET), max_size=60)
WORDS = st.lists(
    st.sampled_from(
        [
            "the",
            " cat",
            "'s",
            "\n\n",
            "  ",
            "\n    if x:",
            "12345",
            "中文",
            "。\n",
            "!!",
            ".\r\n",
            "👨‍👩‍👧",
            "e\u0301",
        ]
    ),
    max_size=40,
).map("".join)


def check_cuts(rule: BoundaryRule, oracle: Oracle, text: str) -> int:
    cuts = [match.start() for match in rule.pattern.finditer(text)]
    for position in cuts:
        together = oracle.pieces(text[:position]) + oracle.pieces(text[position:])
        assert together == oracle.pieces(text), (text, position)
    return len(cuts)


def test_every_cut_of_every_text_of_three_characters(oracle: Oracle) -> None:
    texts = map("".join, itertools.product(ALPHABET, repeat=3))
    assert sum(check_cuts(DEEPSEEK, oracle, text) for text in texts) > 20_000


def test_every_cut_of_every_text_of_three_characters_gpt2(tiny_oracle: Oracle) -> None:
    texts = map("".join, itertools.product([*ALPHABET, "s", "'r", "e"], repeat=3))
    assert sum(check_cuts(GPT2, tiny_oracle, text) for text in texts) > 6_000


@pytest.mark.slow
def test_every_cut_of_every_text_of_five_characters(oracle: Oracle) -> None:
    one_each = ["a", "\u0301", "1", "中", ".", " ", "\n", "\r", "\t", "\u0085", "\x00", "😀"]
    texts = map("".join, itertools.product(one_each, repeat=5))
    assert sum(check_cuts(DEEPSEEK, oracle, text) for text in texts) > 100_000


@given(text=TRICKY | WORDS | st.text(max_size=60))
def test_cuts_change_no_piece(oracle: Oracle, text: str) -> None:
    check_cuts(DEEPSEEK, oracle, text)


@given(text=TRICKY | WORDS | st.text(max_size=60))
def test_cuts_change_no_piece_gpt2(tiny_oracle: Oracle, text: str) -> None:
    check_cuts(GPT2, tiny_oracle, text)


@given(text=WORDS | TRICKY, target=st.integers(1, 12))
def test_cut_pieces_have_the_ids_of_the_whole(oracle: Oracle, text: str, target: int) -> None:
    pieces = list(cut(text, DEEPSEEK, target))
    assert "".join(pieces) == text
    assert all(len(piece) >= target for piece in pieces[:-1])
    ids = [token for piece in pieces for token in oracle.ids(piece)]
    assert ids == oracle.ids(text)


@given(head=WORDS, one=WORDS, other=WORDS, target=st.integers(1, 12))
def test_texts_with_a_common_prefix_share_their_pieces(head: str, one: str, other: str, target: int) -> None:
    common, known = list(cut(head, DEEPSEEK, target)), len(head)
    for tail in (one, other):
        pieces = list(cut(head + tail, DEEPSEEK, target))
        ends = itertools.accumulate(map(len, pieces))
        whole = [piece for piece, end in zip(pieces, ends, strict=True) if end < known]
        assert common[: len(whole)] == whole


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("ab cd", [2]),  # before a space
        ("ab  cd", [2]),  # not between spaces: the second one belongs to the word
        ("a.\nb", [1, 3]),  # not between . and newline: one piece
        ("x\n\ny", [1, 3]),
        ("x\n y", [1]),  # a space after a newline may belong to the word
        ("中文，好", [2, 3]),
        ("1234", []),
        ("a1b", [1]),  # digit before a letter is safe too, and not needed
        ("=====", []),
        ("\u200b x", []),  # once white space: left alone
        ("", []),
    ],
)
def test_examples(text: str, cuts: list[int]) -> None:
    assert [match.start() for match in DEEPSEEK.pattern.finditer(text)] == cuts


def test_cuts_that_look_safe_and_are_not(oracle: Oracle) -> None:
    for text, position in ((".\nx", 1), ("\n\n x", 1), ("   x", 1), ("1234", 2), ("a\u0301b", 1)):
        apart = oracle.pieces(text[:position]) + oracle.pieces(text[position:])
        assert apart != oracle.pieces(text)
        assert position not in [match.start() for match in DEEPSEEK.pattern.finditer(text)]


def test_after_a_newline_is_not_safe_for_gpt2(tiny_oracle: Oracle) -> None:
    assert tiny_oracle.pieces("\n\n") + tiny_oracle.pieces("x") != tiny_oracle.pieces("\n\nx")
    assert GPT2.next_cut("\n\nx", 1) is None


def test_the_cjk_class_holds_no_digit() -> None:
    ranges = [*range(0x4E00, 0x9FA6), *range(0x3040, 0x3100)]
    assert not [code for code in ranges if unicodedata.category(chr(code)).startswith("N")]


def test_next_cut_starts_where_told() -> None:
    assert DEEPSEEK.next_cut("a b c", 0) == 1
    assert DEEPSEEK.next_cut("a b c", 2) == 3
    assert DEEPSEEK.next_cut("a b c", 4) is None


def test_without_a_rule_or_a_safe_place_the_text_stays_whole() -> None:
    assert list(cut("a b c", None, 1)) == ["a b c"]
    assert list(cut("=" * 50, DEEPSEEK, 10)) == ["=" * 50]
    assert list(cut("", DEEPSEEK, 10)) == []


def test_rules_are_found_for_what_they_were_proved_for(deepseek: TokenizerFile, tiny: TokenizerFile) -> None:
    assert rule_for(deepseek.parsed) is DEEPSEEK
    assert rule_for(tiny.parsed) is GPT2
    assert rule_for(tiny.changed("pre_tokenizer", "trim_offsets", to=False).parsed) is GPT2


def test_anything_else_gets_no_rule(deepseek: TokenizerFile, tiny: TokenizerFile) -> None:
    split = ("pre_tokenizer", "pretokenizers")
    for other in (
        deepseek.changed(*split, 0, "pattern", to={"Regex": r"\p{N}"}),
        deepseek.changed(*split, 2, "behavior", to="MergedWithNext"),
        deepseek.changed(*split, 3, "add_prefix_space", to=True),
        deepseek.changed(*split, to=deepseek.parsed["pre_tokenizer"]["pretokenizers"][:2]),
        deepseek.changed("normalizer", to={"type": "NFC"}),
        tiny.changed("model", "dropout", to=0.1),
        tiny.changed("model", "type", to="Unigram"),
        tiny.changed("pre_tokenizer", to=None),
    ):
        assert rule_for(other.parsed) is None
