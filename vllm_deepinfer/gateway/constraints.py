"""Constraints on the answer: response formats, `strict` tools and forced tool choices, for the engine.

Formats without tools map to the engine's plain kinds. Everything with tools becomes xgrammar's structural-tag
language, because a tool call is DSML text whose arguments follow a schema, possibly after free text:

| request | grammar after reasoning |
|---|---|
| strict tools, or one call at most | free text, in which a calls block may open; inside it only these tools |
| tool_choice required or named | a calls block and nothing else |
| response format and tools | the format, or a calls block |

The recipe package refuses a required choice in thinking mode; here the model reasons first and then has to
call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_recipe import ConversationRequest, ModelVersion, ToolDefinition

from vllm_deepinfer.engine import ConstraintKind, StructuredOutput
from vllm_deepinfer.gateway.errors import ApiError

Format = dict[str, Any]
MOST_CHARACTERS = 120_000
"""Of a constraint as the engine gets it. A long one takes seconds to build (25 s for an enum of 8,000 long
strings), in which other constrained requests wait."""


@dataclass(kw_only=True)
class ToolPolicy:
    """What a request says about calling tools.

    Attributes:
        forced: at least one call has to be made.
        only: names that may be called; None: all.
        parallel: whether one answer may hold several calls.
        strict: names of tools whose arguments must follow their schema.
    """

    forced: bool = False
    only: frozenset[str] | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    _choice: Any = field(default=None, repr=False)

    @classmethod
    def take(cls, body: Mapping[str, Any], plain: dict[str, Any], *, parallel: bool) -> ToolPolicy:
        """Read `tool_choice` and `tools` of any dialect; leave in `plain` what the recipe can convert.

        Raises: ApiError for a choice that names no declared tool.
        """
        choice = body.get("tool_choice")
        policy = cls(parallel=parallel)
        if isinstance(choice, dict):
            policy._read_object(choice)
            policy.parallel = parallel and not choice.get("disable_parallel_tool_use")
        policy.forced = policy.forced or choice in ("required", "any")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            plain["tool_choice"] = "required" if policy.forced else "auto"
        policy._read_tools(plain)
        if policy.forced:
            policy._choice = plain.pop("tool_choice", None)
        return policy

    def _read_object(self, choice: Mapping[str, Any]) -> None:
        kind = choice.get("type")
        if kind == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            tools = allowed.get("tools") if isinstance(allowed, dict) else None
            if not isinstance(tools, list) or not tools:
                raise ApiError(400, "tool_choice: allowed_tools needs a list of tools.", param="tool_choice")
            self.forced = allowed.get("mode") == "required"
            self.only = frozenset(name for name in map(_tool_name, tools) if name)
        elif kind in ("function", "tool", "custom"):
            name = _tool_name(choice)
            self.forced = True
            self.only = frozenset({name}) if name else None
        elif kind == "any":
            self.forced = True

    def _read_tools(self, plain: dict[str, Any]) -> None:
        tools = plain.get("tools")
        if not isinstance(tools, list):
            return
        strict: set[str] = set()
        plain["tools"] = [_note_strict(tool, strict) for tool in tools]
        self.strict = frozenset(strict)

    def convert(
        self, conversion: Callable[[], ConversationRequest], plain: dict[str, Any]
    ) -> ConversationRequest:
        """Run the recipe's conversion, without a forced choice if the model reasons first."""
        conversation = conversion()
        if not self.forced:
            return conversation
        names = {tool.name for tool in conversation.conversation.tools}
        missing = (self.only or frozenset()) - names
        if missing or not names:
            what = f"names {sorted(missing)[0]!r}, which is not in tools" if missing else "needs tools"
            raise ApiError(400, f"tool_choice {what}.", param="tool_choice")
        if conversation.conversation.thinking_mode:
            return conversation
        plain["tool_choice"] = self._choice
        return conversion()

    def callable_tools(self, conversation: ConversationRequest) -> list[ToolDefinition]:
        """Tools that the answer may call."""
        if conversation.conversation.tool_choice == "none":
            return []
        tools = conversation.conversation.tools
        return [tool for tool in tools if self.only is None or tool.name in self.only]

    def is_strict(self, tool: ToolDefinition) -> bool:
        """Whether this tool's arguments are held to its schema. Namespaced names end in the declared one."""
        return tool.name in self.strict or tool.name.rsplit("::", 1)[-1] in self.strict


def output_constraint(
    conversation: ConversationRequest, policy: ToolPolicy, explicit: StructuredOutput | None
) -> StructuredOutput | None:
    """The constraint of a request.

    Raises: ApiError when two of its parts exclude each other, or when it is longer than `MOST_CHARACTERS`.
    """
    made = _output_constraint(conversation, policy, explicit)
    if made is not None and len(made.value) > MOST_CHARACTERS:
        raise ApiError(
            400,
            f"the output's constraint (schema, pattern, grammar and strict tools) has {len(made.value)} "
            f"characters; write at most {MOST_CHARACTERS}.",
            code="invalid_constraint",
        )
    return made


def _output_constraint(
    conversation: ConversationRequest, policy: ToolPolicy, explicit: StructuredOutput | None
) -> StructuredOutput | None:
    stage = conversation.parsing_options.thinking_initial_stage
    reasons = stage is not None and stage.starts_in_reasoning()
    answer = explicit or _response_format(conversation)
    tools = policy.callable_tools(conversation)
    plain_tools = not policy.forced and policy.parallel and policy.only is None
    needs_grammar = bool(tools) and (
        answer is not None or not plain_tools or any(map(policy.is_strict, tools))
    )
    if not needs_grammar:
        return answer and StructuredOutput(kind=answer.kind, value=answer.value, after_reasoning=reasons)
    grammar = _with_tools(conversation, policy, tools, answer)
    value = json.dumps({"type": "structural_tag", "format": grammar}, ensure_ascii=False)
    return StructuredOutput(kind=ConstraintKind.STRUCTURAL_TAG, value=value, after_reasoning=reasons)


def _response_format(conversation: ConversationRequest) -> StructuredOutput | None:
    wanted = conversation.conversation
    if wanted.response_format == "json_object":
        return StructuredOutput(kind=ConstraintKind.JSON_OBJECT)
    if wanted.response_format == "json_schema":
        return StructuredOutput(kind=ConstraintKind.JSON_SCHEMA, value=json.dumps(wanted.response_schema))
    if wanted.response_format == "regex" and wanted.response_regex:
        return StructuredOutput(kind=ConstraintKind.REGEX, value=wanted.response_regex)
    return None


def _with_tools(
    conversation: ConversationRequest,
    policy: ToolPolicy,
    tools: list[ToolDefinition],
    answer: StructuredOutput | None,
) -> Format:
    space = "" if conversation.model_version == ModelVersion.DeepseekV4Pro else " "
    calls = "tool_calls" if not space else " calls"
    opened, closed = f"<｜DSML｜{calls}>\n", f"</｜DSML｜{calls}>"
    block = {
        "type": "tags_with_separator",
        "tags": [_invoke(tool, policy.is_strict(tool), space) for tool in tools],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": not policy.parallel,
    }
    if conversation.parsing_options.starts_in_tool_calls:  # the prompt has opened the block already
        return _sequence(block, _const(closed))
    only_calls = _sequence(_const("\n\n" + opened), block, _const(closed))
    if policy.forced:
        return only_calls
    if answer is not None:
        return {"type": "or", "elements": [_format(answer), only_calls]}
    return {
        "type": "triggered_tags",
        "triggers": [opened[:-1]],
        "tags": [{"type": "tag", "begin": opened, "content": block, "end": closed}],
        "stop_after_first": not policy.parallel,
        "excludes": ["<think>", "</think>"],
    }


def _invoke(tool: ToolDefinition, strict: bool, space: str) -> Format:
    schema = tool.parameters if strict and tool.parameters else {"type": "object"}
    content = {
        "type": "json_schema",
        "json_schema": schema,
        "style": "deepseek_v4_1_xml" if space else "deepseek_xml",
    }
    begin = f'<｜DSML｜{space}invoke name="{tool.name}">\n'
    return {"type": "tag", "begin": begin, "content": content, "end": f"</｜DSML｜{space}invoke>\n"}


def _format(answer: StructuredOutput) -> Format:
    if answer.kind is ConstraintKind.JSON_OBJECT:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if answer.kind is ConstraintKind.JSON_SCHEMA:
        return {"type": "json_schema", "json_schema": json.loads(answer.value)}
    if answer.kind is ConstraintKind.REGEX:
        return {"type": "regex", "pattern": answer.value}
    if answer.kind is ConstraintKind.GRAMMAR:
        return {"type": "grammar", "grammar": answer.value}
    if answer.kind is ConstraintKind.CHOICE:
        return {"type": "or", "elements": [_const(text) for text in json.loads(answer.value)]}
    raise ApiError(400, "a structural tag cannot be combined with tools; put the tools into the tag.")


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def without_strict(holder: Any, *path: str) -> Any:
    """`holder` with `strict` removed from the object at `path`: see `_note_strict` for why."""
    if not isinstance(holder, dict):
        return holder
    if not path:
        return {key: value for key, value in holder.items() if key != "strict"}
    inner = holder.get(path[0])
    return holder if inner is None else {**holder, path[0]: without_strict(inner, *path[1:])}


def _tool_name(tool: Any) -> str | None:
    if not isinstance(tool, dict):
        return None
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def _note_strict(tool: Any, strict: set[str]) -> Any:
    """Note a strict tool's name; return the tool without the flag.

    The recipe must not see it: normalising a strict schema, version 0.2.0 drops `$defs` and leaves references
    to them dangling, refuses `enum` without `type`, and refuses strict tools beside a response format. The
    grammar holds the arguments to the schema as the user wrote it.
    """
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
        return {**tool, "tools": [_note_strict(inner, strict) for inner in tool["tools"]]}
    nested = tool.get("function")
    body = nested if isinstance(nested, dict) else tool
    name = _tool_name(tool)
    if body.get("strict") is not True or name is None:
        return tool
    strict.add(name)
    relaxed = {key: value for key, value in body.items() if key != "strict"}
    return {**tool, "function": relaxed} if body is nested else relaxed
