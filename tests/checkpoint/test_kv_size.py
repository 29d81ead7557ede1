"""Sizes of KV and weights, against published figures and against counting by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.samples import config
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.kv_size import (
    KvForm,
    encoding_of,
    entry_bytes,
    index_bytes,
    request_bytes,
    token_bytes,
    weight_bytes,
    window_row_bytes,
)
from vllm_deepinfer.checkpoint.layout import ENCODINGS, Encoding
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint

RELEASED = V41Config.from_dict(config("released"))
TEXT = RELEASED.text_config


@pytest.mark.parametrize(
    ("form", "entry", "index", "window", "token"),
    [
        (KvForm.PACKED, 288, 68, 528, 890.0),  # 890 B per token: DeepSeek's technical report
        (KvForm.PORTABLE, 1024, 256, 1024, 3200.0),
        (KvForm.FP8, 528, 132, 528, 1650.0),  # record widths: vLLM 0.32, models/deepseek_v41/attention.py
        (KvForm.FP8_V4, 584, 132, 584, 1790.0),
    ],
)
def test_rows_of_the_release(form: KvForm, entry: int, index: int, window: int, token: float) -> None:
    assert entry_bytes(TEXT, form) == entry
    assert index_bytes(TEXT, form) == index
    assert window_row_bytes(TEXT, form) == window
    assert token_bytes(TEXT, form) == token


def test_a_request_of_a_million_tokens() -> None:
    windows = 40 * 128 * 528
    assert request_bytes(TEXT, 1 << 20, KvForm.PACKED) == 890 * (1 << 20) + windows
    assert request_bytes(TEXT, 1, KvForm.PACKED) == 890 + 40 * 528


def test_published_capacity_lies_above_the_bound() -> None:
    """13.47 GiB of fp8 KV on H100 hold 7.02 M tokens: 2,060 B per token, with windows and unfilled blocks."""
    assert 0.8 < token_bytes(TEXT, KvForm.FP8_V4) / (13.47 * 2**30 / 7.02e6) < 1.0


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.sampled_from(KvForm))
def test_longer_requests_take_more_and_no_form_less_than_packed(one: int, more: int, form: KvForm) -> None:
    assert request_bytes(TEXT, one + more, form) > request_bytes(TEXT, one, form)
    assert request_bytes(TEXT, one, form) >= request_bytes(TEXT, one, KvForm.PACKED)


def test_weights_of_the_release() -> None:
    """About 510 GB in all and 189 GiB of Engram, as published."""
    sizes = weight_bytes(RELEASED, "released")
    assert round(sizes.total / 1e9) == 509
    assert round(sizes.engram / 2**30) == 189
    assert round(sizes.experts / 2**30) == 276
    assert sizes.experts + sizes.engram + sizes.rest == sizes.total


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_are_what_a_written_checkpoint_holds(encoding: Encoding, tmp_path: Path) -> None:
    options = TinyOptions(layers=4, encoding=encoding, dspark_blocks=1)
    written = write_checkpoint(tmp_path / "model", options)
    read = V41Config.load(written.folder)
    assert encoding_of(read) == encoding
    assert weight_bytes(read, encoding).total == written.weight_bytes


def test_a_model_without_compressed_caches_keeps_windows_alone() -> None:
    options = TinyOptions(
        ratios=(0, 0), kv_sources=(), index_sources=(), candidate_source=-1, engram_layers=()
    )
    text = V41Config.from_dict(options.build_config(options.build_tokenizer())).text_config
    assert token_bytes(text, KvForm.PORTABLE) == 0
    assert request_bytes(text, 1000, KvForm.PORTABLE) == 2 * 16 * 2 * 32
