"""Where a text can be cut without changing any token id, by rules proved in this folder's README.

A byte-level BPE tokenizer first splits the text into pieces with regular expressions (the pre-tokenizer) and
then merges bytes inside each piece only. A cut changes no id if it falls between two pieces and the pieces on
either side stay what they were. Whether that holds is a property of the expressions, so every rule names the
exact pre-tokenizer that it was proved for, and `rule_for` hands out a rule for that pre-tokenizer and for no
other.

All rules look at the two characters next to the cut and use only explicit code points, except "not white
space", which takes the widest set any Unicode version has had. They hold for every version that the tokenizer
may be built on.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

_CJK = "\u4e00-\u9fa5\u3040-\u30ff"  # 一-龥, Hiragana, Katakana: the class of DeepSeek's second Split
_SPACES = "\\s\u180e\u200b-\u200f\u2060\ufeff"  # \s, and what was or might be taken for white space

_BEFORE_SPACE = f"(?<=[^{_SPACES}])(?= )"
_AFTER_ASCII_WORD = r"(?<=[A-Za-z])(?=[\x00-@\[-`{-\x7f])"
_AFTER_NEWLINE = r"(?<=\n)(?=[!-~])"
_AROUND_CJK = f"(?<=[{_CJK}])(?=[^{_CJK}])|(?<=[^{_CJK}])(?=[{_CJK}])"


@dataclass(frozen=True)
class BoundaryRule:
    """The safe cuts of one pre-tokenizer.

    `pattern` matches the empty string at every position where a cut is safe.
    """

    name: str
    pre_tokenizer: Json
    pattern: re.Pattern[str]

    def next_cut(self, text: str, start: int) -> int | None:
        """The first safe cut at or after `start` (> 0), in code points; None if there is none."""
        found = self.pattern.search(text, max(start, 1))
        return found.start() if found else None


def _split(regex: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


DEEPSEEK = BoundaryRule(
    name="deepseek-v3",  # unchanged through V4
    pre_tokenizer={
        "type": "Sequence",
        "pretokenizers": [
            _split(r"\p{N}{1,3}"),
            _split("[一-龥\u3040-ゟ゠-ヿ]+"),
            _split(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
                "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                "| ?[\\p{P}\\p{S}]+[\r\n]*"
                "|\\s*[\r\n]+"
                r"|\s+(?!\S)"
                r"|\s+"
            ),
            _byte_level(use_regex=False),
        ],
    },
    pattern=re.compile("|".join((_AFTER_NEWLINE, _BEFORE_SPACE, _AROUND_CJK, _AFTER_ASCII_WORD))),
)

GPT2 = BoundaryRule(
    name="gpt2",  # the expression built into ByteLevel; what small test tokenizers use
    pre_tokenizer=_byte_level(use_regex=True),
    pattern=re.compile("|".join((_BEFORE_SPACE, _AFTER_ASCII_WORD))),
)

RULES = (DEEPSEEK, GPT2)


def rule_for(tokenizer: Json) -> BoundaryRule | None:
    """The proved rule for a parsed tokenizer.json, or None if no proof covers it."""
    if not _identity_normalizer(tokenizer.get("normalizer")):
        return None
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None
    found = _canonical(tokenizer.get("pre_tokenizer"))
    return next((rule for rule in RULES if rule.pre_tokenizer == found), None)


def cut(text: str, rule: BoundaryRule | None, target: int) -> Iterator[str]:
    """Cuts `text` at the first safe place after every `target` code points; without a rule, not at all.

    A cut depends only on the text before it and one character after it, so texts with a common prefix get the
    same pieces there. That is what makes pieces worth caching.
    """
    start = 0
    while rule is not None and len(text) - start > target:
        end = rule.next_cut(text, start + target)
        if end is None:
            break
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _identity_normalizer(normalizer: Json | None) -> bool:
    return normalizer is None or (normalizer["type"] == "Sequence" and not normalizer["normalizers"])


def _canonical(node: Any) -> Any:
    """The pre-tokenizer without `trim_offsets`, which moves offsets and never ids."""
    if isinstance(node, Mapping):
        return {key: _canonical(value) for key, value in node.items() if key != "trim_offsets"}
    if isinstance(node, list):
        return [_canonical(value) for value in node]
    return node
