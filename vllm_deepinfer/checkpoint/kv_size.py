"""How much memory a token and a request take in a DeepSeek-V4.1 KV cache, and a rank of its weights.

Global KV, kept for every token of the context, lies in the KV sources alone: per source one compressed entry
and one index key for every `ratio` tokens. Every layer keeps its sliding window besides. Worked example, the
released config in the packed form: 288 B (E2M1 of 512 values and an E4M3 scale per 16) + 68 B (MXFP4 of 128
values and a scale per 32) = 356 B, for sources of the ratios 2, 2, 2, 1: 2.5 × 356 = 890 B per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from .config import V41Config
from .layout import Encoding
from .tensors import Kind, entries
from .text_config import TextConfig
from .weights import stored_headers


class KvForm(Enum):
    """How a KV cache stores its rows.

    PORTABLE: this project's class, bfloat16 rows that have been rounded to the released formats.
    PACKED: the released formats bit for bit; the least that any cache takes.
    FP8: vLLM's fp8_ds_mla on SM100: E4M3 with a scale per 32 values, index keys in FP8.
    FP8_V4: the same on other CUDA devices, whose kernels read V4's record.
    """

    PORTABLE = "portable"
    PACKED = "packed"
    FP8 = "fp8"
    FP8_V4 = "fp8 v4"


def entry_bytes(text: TextConfig, form: KvForm) -> int:
    """One compressed entry."""
    size = text.head_dim
    if form is KvForm.PORTABLE:
        return 2 * size
    if form is KvForm.PACKED:
        return size // 2 + size // 16
    return window_row_bytes(text, form)


def index_bytes(text: TextConfig, form: KvForm) -> int:
    """One index key."""
    size = text.index_head_dim
    if form is KvForm.PORTABLE:
        return 2 * size
    if form is KvForm.PACKED:
        return size // 2 + size // 32
    return size + size // 128 * 4


def window_row_bytes(text: TextConfig, form: KvForm) -> int:
    """One token of one layer's sliding window."""
    size, rope = text.head_dim, text.qk_rope_head_dim
    if form is KvForm.PORTABLE:
        return 2 * size
    if form is KvForm.FP8_V4:
        return (size - rope) + 2 * rope + (size - rope) // 64 + 1
    return size + size // 32


def token_bytes(text: TextConfig, form: KvForm) -> float:
    """Global KV per token of context."""
    row = entry_bytes(text, form) + index_bytes(text, form)
    return sum(row / plan.ratio for plan in text.schedule() if plan.owns_kv)


def request_bytes(text: TextConfig, tokens: int, form: KvForm) -> int:
    """What a request of `tokens` tokens needs at least: its global KV, and the window of every layer.

    An allocator adds the unused part of its last blocks, and rows for the tokens of a step in flight.
    """
    windows = text.num_hidden_layers * min(tokens, text.sliding_window) * window_row_bytes(text, form)
    return math.ceil(tokens * token_bytes(text, form)) + windows


@dataclass(frozen=True)
class WeightBytes:
    """Stored sizes of a model's parts, in bytes.

    Attributes:
        experts: routed experts of all layers, which expert parallelism divides.
        engram: hash tables, which vLLM keeps in host memory.
        rest: everything else; every data-parallel rank has all of it, tensor parallelism divides most of it.
    """

    experts: int
    engram: int
    rest: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.experts + self.engram + self.rest


def weight_bytes(config: V41Config, encoding: Encoding) -> WeightBytes:
    """What the tensors of a config take in an encoding."""
    sizes = {"experts": 0, "engram": 0, "rest": 0}
    for name, entry in entries(config):
        size = sum(header.nbytes for header in stored_headers(name, entry, encoding).values())
        part = "experts" if entry.kind is Kind.EXPERT else "engram" if entry.kind is Kind.ROWS else "rest"
        sizes[part] += size
    return WeightBytes(**sizes)


def encoding_of(config: V41Config) -> Encoding:
    """The stored form that a config announces."""
    if config.quantization_config is not None:
        return "released"
    return "fp32" if config.dtype == "float32" else "bf16"
