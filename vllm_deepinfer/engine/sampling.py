"""How to sample: the part of a request that says which distribution the tokens come from and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from vllm_deepinfer.engine.errors import InvalidRequest


class ConstraintKind(StrEnum):
    """The language in which `StructuredOutput.value` is written."""

    JSON_OBJECT = "json_object"  # any JSON object; value is empty
    JSON_SCHEMA = "json_schema"  # value is a JSON Schema document
    REGEX = "regex"
    GRAMMAR = "grammar"  # EBNF as xgrammar reads it
    CHOICE = "choice"  # value is a JSON array of strings
    STRUCTURAL_TAG = "structural_tag"  # value is xgrammar's structural-tag JSON: strict tools among free text


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A constraint on the text of the answer.

    Attributes:
        kind: the language of `value`.
        value: the constraint itself; text, so that it crosses processes and hashes.
        after_reasoning: True: the constraint starts after the model's end-of-reasoning token; False: at the
            first token.
    """

    kind: ConstraintKind
    value: str = ""
    after_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.kind is ConstraintKind.JSON_OBJECT and self.value:
            raise InvalidRequest(
                "structured output of kind json_object takes no value; use json_schema instead."
            )
        if self.kind is not ConstraintKind.JSON_OBJECT and not self.value:
            raise InvalidRequest(f"structured output of kind {self.kind} needs a value, got an empty one.")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sampling parameters over token ids. Names and ranges are those of vLLM's class of the same name.

    Stop *strings* and `n` are not here: an engine knows no text, so the gateway matches strings and aborts,
        and
    it submits `n` requests.

    Attributes:
        max_tokens: most tokens to generate, ≥ 1; None: until the context is full.
        min_tokens: neither the end-of-sequence token nor `stop_token_ids` are sampled before this many
            tokens.
        temperature: 0 is greedy.
        top_p: in (0, 1]. top_k: 0 is off. min_p: in [0, 1], 0 is off.
        seed: makes the draws of this request reproducible on one engine.
        stop_token_ids: ends the answer (the token is delivered, with the id as `TokenDelta.stop_reason`).
        ignore_eos: go on past the engine's own `EngineInfo.eos_token_ids`.
        presence_penalty, frequency_penalty: in [-2, 2]. repetition_penalty: > 0, 1 is off.
        logit_bias: token id to a number in [-100, 100] that is added to its logit.
        logprobs: None: none; k ≥ 0: the sampled token's, and the k most likely ones.
        prompt_logprobs: the same for every prompt position; turns the prefix cache off for this request.
        structured: a constraint on the answer.
        forced: the answer begins with these tokens. Each is computed, counted by constraints and penalties,
            and takes its draw of the seed, as when it was sampled: so an answer that an engine has lost goes
            on in another one exactly. Only for engines whose `EngineInfo.forces_tokens` says so.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    forced: Sequence[int] = []

    def __post_init__(self) -> None:
        """Raises: InvalidRequest naming the field, its value and the range."""
        for name, (default, low, high, open_low) in _RANGES.items():
            value = getattr(self, name)
            if value != default:  # as most are: this runs twice per request
                _check(name, value, low, high, open_low)
        if self.min_tokens:
            _check("min_tokens", self.min_tokens, 0, math.inf if self.max_tokens is None else self.max_tokens)
        for token_id in self.stop_token_ids:
            _check("stop_token_ids", token_id, 0, math.inf)
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias key", token_id, 0, math.inf)
            _check(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


_RANGES: dict[str, tuple[float | None, float, float, bool]] = {  # default, low, high, low is excluded
    "max_tokens": (None, 1, math.inf, False),
    "temperature": (1.0, 0.0, 1e4, False),
    "top_p": (1.0, 0.0, 1.0, True),
    "top_k": (0, 0, math.inf, False),
    "min_p": (0.0, 0.0, 1.0, False),
    "seed": (None, -(2**63), 2**63 - 1, False),
    "presence_penalty": (0.0, -2.0, 2.0, False),
    "frequency_penalty": (0.0, -2.0, 2.0, False),
    "repetition_penalty": (1.0, 0.0, 1e4, True),
    "logprobs": (None, 0, math.inf, False),
    "prompt_logprobs": (None, 0, math.inf, False),
}


def _check(name: str, value: float | None, low: float, high: float, open_low: bool = False) -> None:
    if value is None:
        return
    above = value > low if open_low else value >= low
    if not (above and value <= high):  # written so that NaN fails
        bracket = "(" if open_low else "["
        end = "∞)" if high == math.inf else f"{high:g}]"
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {end}, got {value}.")
