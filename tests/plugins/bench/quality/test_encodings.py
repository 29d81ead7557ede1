"""A checkpoint re-encoded as released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_deepinfer_plugins.bench.quality.encodings import as_released
from vllm_deepinfer_plugins.model.weights import load_backbone

from tests.plugins.model.samples import tiny, token_ids
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.errors import ConfigError
from vllm_deepinfer.checkpoint.kv_size import encoding_of


def test_the_same_model_with_coarser_weights(tmp_path: Path) -> None:
    source = tiny(tmp_path, layers=4, encoding="bf16", dspark_blocks=1)
    target = as_released(source, tmp_path / "released")
    assert encoding_of(V41Config.load(source)) == "bf16"
    assert encoding_of(V41Config.load(target)) == "released"
    ids = token_ids(30).unsqueeze(0)
    with torch.no_grad():
        before, after = load_backbone(source).whole(ids), load_backbone(target).whole(ids)
    assert not torch.equal(before, after)
    agree = (before.softmax(-1) * after.softmax(-1)).sum() / before.softmax(-1).square().sum()
    assert agree > 0.5
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_widths_that_no_scale_covers(tmp_path: Path) -> None:
    source = tiny(tmp_path, layers=4, expert_width=40)
    with pytest.raises(ConfigError, match="moe_intermediate_size is 40: write a multiple of 32"):
        as_released(source, tmp_path / "released")
    assert not (tmp_path / "released").exists()
