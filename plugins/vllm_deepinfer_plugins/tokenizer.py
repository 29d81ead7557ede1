"""Control tokens that no request can forge, for plain `vllm serve` (tokenizer mode deepseek_v41).

vLLM 0.32 renders a chat into one string and encodes it with the control tokens live, so `<｜Assistant｜>` in
a user's message becomes the real token (tokenizers/deepseek_v41.py, `apply_chat_template`). Here vLLM's own
template runs on private copies of its two modules in which every control token is wrapped in a marker that is
random per process. What carries the marker was written by the template; everything else is text, and
`PromptTokenizer` encodes it without control tokens, long prompts in parallel and known ones from its cache.

Prompts that a client sends as a string (/v1/completions) are the client's own rendering and stay as in vLLM.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import secrets
from functools import cache
from types import ModuleType
from typing import Any

from transformers import TokenizersBackend
from vllm.tokenizers.hf import HfTokenizer, get_cached_tokenizer
from vllm.tokenizers.protocol import TokenizerLike

from vllm_deepinfer.gateway.tokens import PromptTokenizer

MODE = "deepseek_v41"

_OPEN, _CLOSE = f"\x02{secrets.token_hex(16)}\x02", f"\x03{secrets.token_hex(16)}\x03"
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


def register_tokenizer() -> None:
    """Makes vLLM use the protected tokenizer for V4.1. Idempotent; for the general plugin."""
    from vllm.tokenizers.registry import TokenizerRegistry

    ours = (__name__, ProtectedDeepseekV41Tokenizer.__name__)
    if TokenizerRegistry.tokenizers.get(MODE) != ours:
        TokenizerRegistry.register(MODE, *ours)


class ProtectedDeepseekV41Tokenizer(TokenizerLike):
    """What vLLM loads for the mode: its own V4.1 tokenizer with another `apply_chat_template`."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> HfTokenizer:
        """As vLLM's. Raises TokenizerError if text could reach a control token's id."""
        return get_cached_tokenizer(protect(TokenizersBackend.from_pretrained(*args, **kwargs)))


def protect(tokenizer: HfTokenizer) -> HfTokenizer:
    """Wraps a Hugging Face tokenizer with V4.1's chat template, control tokens known by position."""
    prompts = _prompt_tokenizer(tokenizer)
    wrapped = _marking_template().get_deepseek_v41_tokenizer(tokenizer)

    class _Protected(wrapped.__class__):  # type: ignore[name-defined,misc]
        def apply_chat_template(self, messages: Any, tools: Any = None, **kwargs: Any) -> str | list[int]:
            wanted = {"tokenize": True} | kwargs
            marked = super().apply_chat_template(messages, tools, **wanted | {"tokenize": False})
            text, ranges = unmark(marked, prompts.vocabulary.control_ids.keys())
            # A request can set any keyword through chat_template_kwargs. Were its "tokenize": false obeyed,
            # vLLM would encode the string itself, control tokens and all. Only its renderer passes
            # `conversation`.
            if not wanted["tokenize"] and "conversation" not in kwargs:
                return text
            return self._truncate(prompts.encode_prompt_blocking(text, ranges), kwargs)

        def _truncate(self, ids: list[int], kwargs: dict[str, Any]) -> list[int]:
            limit = kwargs.get("max_length")
            if not kwargs.get("truncation") or limit is None or len(ids) <= limit:
                return ids
            return ids[len(ids) - limit :] if self.truncation_side == "left" else ids[:limit]

        def __reduce__(self) -> tuple[Any, ...]:
            return protect, (tokenizer,)

    _Protected.__name__ = f"Protected{wrapped.__class__.__name__}"
    wrapped.__class__ = _Protected
    return wrapped


def unmark(marked: str, control: Any) -> tuple[str, list[tuple[int, int]]]:
    """The prompt without markers, and the code point ranges of its control tokens.

    A token that the tokenizer does not have stays text, as it does in vLLM.
    """
    parts, ranges, length = [], [], 0
    for index, part in enumerate(_MARKED.split(marked)):
        if index % 2 and part in control:
            ranges.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return "".join(parts), ranges


@cache
def _marking_template() -> ModuleType:
    """Private copies of vLLM's V4.1 template modules that mark the control tokens they write."""
    encoding = _copy_of("deepseek_v41_encoding")
    template = _copy_of("deepseek_v41")
    marks = _marks_of(encoding)
    for name, value in vars(encoding).copy().items():
        setattr(encoding, name, _mark(value, marks) if not name.startswith("_") else value)
    template.encode_messages = encoding.encode_messages  # type: ignore[attr-defined]
    template.IMAGE_PLACEHOLDER = encoding.IMAGE_PLACEHOLDER  # type: ignore[attr-defined]
    return template


def _copy_of(name: str) -> ModuleType:
    source = importlib.util.find_spec(f"vllm.tokenizers.{name}")
    assert source is not None and source.origin is not None
    spec = importlib.util.spec_from_file_location(f"vllm.tokenizers._deepinfer_{name}", source.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _marks_of(encoding: ModuleType) -> re.Pattern[str]:
    """Finds every control token that the template module names, in its constants."""
    names = ["bos_token", "eos_token", "thinking_start_token", "thinking_end_token", "dsml_token"]
    names += ["USER_SP_TOKEN", "ASSISTANT_SP_TOKEN", "SYSTEM_SP_TOKEN", "LATEST_REMINDER_SP_TOKEN"]
    tokens = [getattr(encoding, name) for name in names]
    tokens += [encoding.IMAGE_PLACEHOLDER, *encoding.DS_TASK_SP_TOKENS.values()]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _mark(value: Any, tokens: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return tokens.sub(lambda token: f"{_OPEN}{token.group()}{_CLOSE}", value)
    if isinstance(value, dict):
        return {key: _mark(entry, tokens) for key, entry in value.items()}
    return value


def _prompt_tokenizer(tokenizer: HfTokenizer) -> PromptTokenizer:
    text = tokenizer.backend_tokenizer.to_str()
    digest = hashlib.sha256(text.encode()).digest()
    if digest not in _prompt_tokenizers:
        _prompt_tokenizers[digest] = PromptTokenizer(text)
    return _prompt_tokenizers[digest]


# vLLM copies tokenizers freely (one per renderer thread); what they share is here.
_prompt_tokenizers: dict[bytes, PromptTokenizer] = {}
