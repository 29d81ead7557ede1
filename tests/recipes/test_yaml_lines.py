"""YAML with lines: values as JSON would have them, a line for every key, duplicates told."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.recipes.yaml_lines import Document, parse


def test_lines_of_keys_and_list_entries() -> None:
    document = parse("a: 1\nb:\n  c: [x,\n      y]\n  d:\n    - e: 2\n")
    assert document.value == {"a": 1, "b": {"c": ["x", "y"], "d": [{"e": 2}]}}
    assert document.lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 3,
        ("b", "c", 1): 4,
        ("b", "d"): 5,
        ("b", "d", 0): 6,
        ("b", "d", 0, "e"): 6,
    }


def test_line_of_a_missing_key_is_that_of_the_part_it_belongs_to() -> None:
    document = parse("a: 1\nb:\n  c: 2\n")
    assert document.line(("b", "x", "y")) == 2
    assert document.line(("z",)) is None
    assert document.line(()) is None


def test_a_key_twice_is_told_with_both_lines_and_the_first_line_is_kept() -> None:
    document = parse("a: 1\nb: 2\na: 3\n")
    assert document.faults == ("line 3 has the key a again, first on line 1: drop one",)
    assert document.lines[("a",)] == 1


def test_a_key_twice_is_found_at_any_depth() -> None:
    document = parse("a:\n  - b: 1\n    b: 2\n")
    assert document.faults == ("line 3 has the key b again, first on line 2: drop one",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),  # YAML 1.1 calls it text
        ("2E3", 2000.0),
        ("1.5e+2", 150.0),
        ("-3e2", -300.0),
        ('"1e-5"', "1e-5"),
        ("1:30", "1:30"),  # YAML 1.1 calls it 90
        ("2026-11-29", "2026-11-29"),  # and this a date
        ("12", 12),
        ("1_000", 1000),
        ("0.5", 0.5),
        ("yes", True),
        ("null", None),
        ("~", None),
        ("!!binary aGFsbG8=", "aGFsbG8="),
        ("!own text", "text"),
        ("[]", []),
        ("{}", {}),
    ],
)
def test_scalars_are_what_json_can_say(text: str, value: object) -> None:
    found = parse(f"a: {text}").value["a"]
    assert (found, type(found)) == (value, type(value))
    json.dumps(found)


def test_keys_become_strings() -> None:
    assert parse("1: a\ntrue: b\n").value == {"1": "a", "true": "b"}


def test_merged_keys_come_from_the_anchor_and_own_ones_win() -> None:
    document = parse("a: &a\n  x: 1\n  y: 2\nb:\n  <<: *a\n  y: 3\n")
    assert document.value["b"] == {"x": 1, "y": 3}
    assert document.faults == ()
    assert document.lines[("b", "x")] == 2
    assert document.lines[("b", "y")] == 6


def test_an_alias_stands_for_its_anchor() -> None:
    assert parse("a: &a [1, 2]\nb: *a\n").value == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("a: [1, 2", "line 1: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n b: 2", "line 2: mapping values are not allowed here"),
        ("a: *nowhere", "line 1: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2", "line 2: but found another document"),
        ("a: &a [*a]", "line 1: an alias contains itself"),
        ("? [1, 2]\n: 3", "line 1: a key is no word"),
        ("<<: 1", "line 1: expected a mapping or list of mappings for merging, but found scalar"),
        ("a: \x00", "unacceptable character #x0000: special characters are not allowed"),
        ("a: !!int x", "line 1: this is no int"),
        ("a: !!bool x", "line 1: this is no bool"),
    ],
)
def test_no_yaml_is_one_clause_with_its_line(text: str, clause: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(text)
    assert str(raised.value) == clause


def test_aliases_of_aliases_are_refused_before_they_fill_the_memory() -> None:
    text = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n"
        for old, new in zip("abcdef", "bcdefg", strict=True)
    )
    with pytest.raises(ValueError, match="it is too large"):
        parse(text)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse("[" * 3000 + "]" * 3000)


def test_an_empty_text_is_none() -> None:
    assert parse("# nothing\n") == Document(None)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON)
def test_what_is_written_is_read_back(value: object) -> None:
    document = parse(yaml.safe_dump(value, allow_unicode=True))
    assert document.value == value
    assert document.faults == ()


@given(st.text(max_size=60))
def test_any_text_is_a_document_or_a_clause(text: str) -> None:
    try:
        json.dumps(parse(text).value)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
