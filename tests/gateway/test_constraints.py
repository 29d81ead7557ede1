"""Constraints of requests: which grammar a combination of tools, choice and format becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepseek_recipe import ModelVersion

from vllm_deepinfer.engine import ConstraintKind, StructuredOutput
from vllm_deepinfer.gateway.constraints import MOST_CHARACTERS, without_strict
from vllm_deepinfer.gateway.dialects import chat
from vllm_deepinfer.gateway.dialects.base import ModelCard
from vllm_deepinfer.gateway.errors import ApiError

V41 = ModelCard(names=("m",), version=ModelVersion.DeepseekV41Flash, max_model_len=4096)
V4 = ModelCard(names=("m",), version=ModelVersion.DeepseekV4Pro, max_model_len=4096)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
PLAIN: dict[str, Any] = {"thinking": {"type": "disabled"}}


def tool(name: str = "f", strict: bool | None = None, **schema: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": schema or SCHEMA}
    return {"type": "function", "function": function if strict is None else function | {"strict": strict}}


def constraint(card: ModelCard = V41, **body: Any) -> StructuredOutput | None:
    request = {"model": "m", "messages": [{"role": "user", "content": "json"}]} | body
    return chat.prepare(request, card, "id").sampling.structured


def grammar(card: ModelCard = V41, **body: Any) -> Any:
    found = constraint(card, **body)
    assert found is not None and found.kind is ConstraintKind.STRUCTURAL_TAG
    tag = json.loads(found.value)
    assert tag["type"] == "structural_tag"
    return tag["format"]


def invokes(block: Any) -> dict[str, Any]:
    """Tool name → schema of a block of calls."""
    assert block["type"] == "tags_with_separator" and block["at_least_one"] is True
    return {tag["begin"].split('"')[1]: tag["content"]["json_schema"] for tag in block["tags"]}


def test_nothing_asked_for_is_no_constraint() -> None:
    assert constraint() is None
    assert constraint(tools=[tool()]) is None
    assert constraint(tools=[tool(strict=False)], tool_choice="auto") is None
    assert constraint(tools=[tool(strict=True)], tool_choice="none") is None


def test_formats_without_tools_keep_their_kind() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    cases: tuple[tuple[dict[str, Any], ConstraintKind, str], ...] = (
        ({"response_format": {"type": "json_object"}}, ConstraintKind.JSON_OBJECT, ""),
        ({"response_format": {"type": "regex", "regex": "a+"}}, ConstraintKind.REGEX, "a+"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, ConstraintKind.GRAMMAR, "root ::= x"),
    )
    for body, kind, value in cases:
        found = constraint(**body)
        assert found is not None and (found.kind, found.value) == (kind, value)
    found = constraint(response_format=schema)
    assert found is not None and json.loads(found.value) == SCHEMA


@pytest.mark.parametrize("thinks", [True, False])
def test_it_begins_after_the_reasoning_if_there_is_any(thinks: bool) -> None:
    extra: dict[str, Any] = {} if thinks else PLAIN
    json_object: dict[str, Any] = {"response_format": {"type": "json_object"}}
    for body in (json_object, {"tools": [tool(strict=True)]}):
        found = constraint(**body, **extra)
        assert found is not None and found.after_reasoning is thinks


def test_definitions_of_a_strict_schema_are_kept() -> None:
    deep: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "$defs": {"x": {"enum": [1]}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": deep, "strict": True}}
    found = constraint(response_format=form)
    assert found is not None and json.loads(found.value) == deep
    opened = grammar(tools=[tool(strict=True, **deep)])
    assert invokes(opened["tags"][0]["content"]) == {"f": deep}


def test_strict_tools_among_free_text() -> None:
    found = grammar(tools=[tool("f", True), tool("g")])
    assert found["type"] == "triggered_tags" and found["triggers"] == ["<｜DSML｜ calls>"]
    (tag,) = found["tags"]
    assert tag["begin"] == "<｜DSML｜ calls>\n" and tag["end"] == "</｜DSML｜ calls>"
    assert invokes(tag["content"]) == {"f": SCHEMA, "g": {"type": "object"}}
    assert found["stop_after_first"] is False


def test_one_call_at_most() -> None:
    found = grammar(tools=[tool()], parallel_tool_calls=False)
    assert found["stop_after_first"] is True and found["tags"][0]["content"]["stop_after_first"] is True


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_forced_choice(choice: Any, thinks: bool) -> None:
    extra: dict[str, Any] = {} if thinks else PLAIN
    found = grammar(tools=[tool("f"), tool("g")], tool_choice=choice, **extra)
    assert found["type"] == "sequence"
    *opening, block, closing = found["elements"]
    # without reasoning the recipe's prompt has opened the block already
    assert [e["value"] for e in opening] == (["\n\n<｜DSML｜ calls>\n"] if thinks else [])
    assert set(invokes(block)) == ({"f", "g"} if choice == "required" else {"g"})
    assert closing == {"type": "const_string", "value": "</｜DSML｜ calls>"}


def test_allowed_tools() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = grammar(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert found["type"] == "triggered_tags" and set(invokes(found["tags"][0]["content"])) == {"g"}
    choice = {"type": "allowed_tools", "allowed_tools": allowed | {"mode": "required"}}
    found = grammar(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert found["type"] == "sequence" and set(invokes(found["elements"][1])) == {"g"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"response_format": {"type": "json_object"}},
            {"type": "json_schema", "json_schema": {"type": "object"}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"type": "regex", "pattern": "a+"}),
        ({"structured_outputs": {"grammar": "root ::= x"}}, {"type": "grammar", "grammar": "root ::= x"}),
        (
            {"structured_outputs": {"choice": ["a"]}},
            {"type": "or", "elements": [{"type": "const_string", "value": "a"}]},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"type": "json_schema", "json_schema": SCHEMA}),
    ],
)
def test_a_format_or_a_call(body: dict[str, Any], expected: Any) -> None:
    found = grammar(tools=[tool(strict=True)], **body)
    assert found["type"] == "or" and found["elements"][0] == expected
    assert found["elements"][1]["type"] == "sequence"


def test_the_older_dialect_has_other_tags() -> None:
    found = grammar(V4, tools=[tool(strict=True)])
    assert found["triggers"] == ["<｜DSML｜tool_calls>"]
    inner = found["tags"][0]["content"]["tags"][0]
    assert inner["begin"] == '<｜DSML｜invoke name="f">\n' and inner["content"]["style"] == "deepseek_xml"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice needs tools."),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice names 'x', which is not in tools.",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "needs a list of tools"),
        (
            {"tools": [tool(strict=True)], "structured_outputs": {"structural_tag": "{}"}},
            "put the tools into",
        ),
    ],
)
def test_what_cannot_be_combined(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        constraint(**body)


def test_without_strict() -> None:
    assert without_strict({"strict": True, "a": 1}) == {"a": 1}
    assert without_strict({"x": {"strict": True}, "strict": 1}, "x") == {"x": {}, "strict": 1}
    assert without_strict({"y": 1}, "x") == {"y": 1}
    assert without_strict("text", "x") == "text"


def test_a_constraint_that_would_hold_up_all_others_is_refused() -> None:
    def wanted(names: int) -> dict[str, Any]:
        schema = {"enum": [f"{number:096d}" for number in range(names)]}
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    found = constraint(response_format=wanted(1_000))
    assert found is not None and 96_000 < len(found.value) < MOST_CHARACTERS
    with pytest.raises(ApiError, match=r"has 2\d{5} characters; write at most 120000") as refused:
        constraint(response_format=wanted(2_000))
    assert (refused.value.status, refused.value.code) == (400, "invalid_constraint")
