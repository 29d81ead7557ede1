"""What is exported is what the loaders read: the same logits, and the released names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_deepinfer_plugins.draft.load import load_drafter
from vllm_deepinfer_plugins.model.weights import load_backbone
from vllm_deepinfer_plugins.train.export import export, round_as_stored

from tests.plugins.train.tiny import FIELDS, TOKENIZER, assert_same, backbone, drafter, weights
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.layout import verify_headers


def test_float32_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, drafts = backbone(), drafter()
    size = export(tmp_path / "x", FIELDS, TOKENIZER, model, drafts, "fp32")
    assert_same(weights(model), weights(load_backbone(tmp_path / "x")))
    assert_same(weights(drafts), weights(load_drafter(tmp_path / "x")))
    parameters = sum(value.numel() for part in (model, drafts) for value in part.parameters())
    assert size == 4 * parameters
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize(("encoding", "tolerance"), [("bf16", 0.01), ("released", 0.4)])
def test_other_encodings_are_near(tmp_path: Path, encoding: str, tolerance: float) -> None:
    model = backbone()
    export(tmp_path / "x", FIELDS, TOKENIZER, model, drafter(), encoding)  # type: ignore[arg-type]
    verify_headers(tmp_path / "x", V41Config.load(tmp_path / "x"))
    for name, value in weights(load_backbone(tmp_path / "x")).items():
        truth = model.get_parameter(name)
        assert (value - truth).norm() <= tolerance * truth.norm() + 1e-6, name


def test_a_rounded_backbone_is_the_one_that_is_stored(tmp_path: Path) -> None:
    """Whoever learns behind it has the target that will be loaded; rounding again changes nothing."""
    model, untouched = backbone(), weights(backbone())
    export(tmp_path / "x", FIELDS, TOKENIZER, model, drafter())
    round_as_stored(model, FIELDS)
    stored = weights(load_backbone(tmp_path / "x"))
    assert_same(weights(model), stored)
    assert any(not torch.equal(value, stored[name]) for name, value in untouched.items())
    assert any(torch.equal(value, stored[name]) for name, value in untouched.items() if value.ndim == 1)
    round_as_stored(model, FIELDS)
    assert_same(weights(model), stored)


def test_an_older_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "old").write_text("")
    export(folder, FIELDS, TOKENIZER, backbone(), drafter())
    assert not (folder / "old").exists() and [path.name for path in tmp_path.iterdir()] == ["x"]
    ids = torch.arange(20, 52).unsqueeze(0)
    with torch.no_grad():
        assert bool(load_backbone(folder).whole(ids).isfinite().all())
