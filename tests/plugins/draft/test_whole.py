"""Golden parity: draft logits and confidences of an independent implementation, in the plain form."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from vllm_deepinfer_plugins.draft.load import load_drafter
from vllm_deepinfer_plugins.draft.whole import features_of, teacher_forced

from tests.plugins.model.engines import FIXTURES
from tests.plugins.model.samples import assert_parity, backbone

NAME = "deepseek-v4.1-tiny-dspark"
GOLDEN = load_file(FIXTURES / NAME / "golden.safetensors")
DRAFTER = load_drafter(FIXTURES / NAME)


def golden(kind: str, length: int) -> torch.Tensor:
    return GOLDEN[f"dspark.{kind}.{length}"]


@pytest.mark.parametrize("length", [37, 160])
@torch.no_grad()
def test_the_target_s_features(length: int) -> None:
    found = features_of(backbone(NAME), golden("ids", length).long(), (5, 6, 7))
    assert found.shape == (length, 3 * 64)
    assert torch.allclose(found, golden("features", length), atol=2e-4, rtol=1e-4)
    assert backbone(NAME).tap is None


@pytest.mark.parametrize("length", [37, 160])
@torch.no_grad()
def test_draft_logits_and_confidences(length: int) -> None:
    """With the golden features, and with those that this project's backbone gives."""
    ids, anchors = golden("ids", length).long(), golden("anchors", length).long()
    for features in (golden("features", length), features_of(backbone(NAME), ids, (5, 6, 7))):
        logits, confidence = teacher_forced(DRAFTER, backbone(NAME), ids, features, anchors)
        assert_parity(golden("logits", length).flatten(0, 1), logits.flatten(0, 1))
        assert torch.allclose(confidence, golden("confidence_logits", length), atol=2e-3)


@torch.no_grad()
def test_a_block_sees_its_window_and_nothing_behind_its_anchor() -> None:
    ids, features = golden("ids", 160).long(), golden("features", 160)
    anchor = torch.tensor([100])
    before, _ = teacher_forced(DRAFTER, backbone(NAME), ids, features, anchor)
    window = DRAFTER.config.sliding_window
    outside = features.clone()
    outside[: 100 - window] = 7.0
    outside[100:] = 7.0
    assert torch.equal(teacher_forced(DRAFTER, backbone(NAME), ids, outside, anchor)[0], before)
    for edge in (100 - window, 99):
        inside = features.clone()
        inside[edge] = 7.0
        assert not torch.equal(teacher_forced(DRAFTER, backbone(NAME), ids, inside, anchor)[0], before)
