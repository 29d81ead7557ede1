from __future__ import annotations

import pytest

from vllm_deepinfer.checkpoint import layout, verify
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.layout import Encoding, TensorSpec, expected_tensors, stored
from vllm_deepinfer.checkpoint.tensors import Entry, Kind, entries

from .samples import config, text_config

FLOATS = frozenset({"F32", "BF16", "F16"})


@pytest.mark.parametrize("encoding", ["bf16", "fp32"])
def test_unquantised_tensors_keep_their_shapes(encoding: Encoding) -> None:
    specs = expected_tensors(text_config(), encoding=encoding)
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: entry.shape for name, entry in entries(text_config())
    }
    assert {spec.dtypes for spec in specs.values()} == {FLOATS}


def test_released_tensors_come_with_scales() -> None:
    config_ = text_config()
    specs = expected_tensors(config_, encoding="released")
    weights = dict(entries(config_))
    scales = {name: spec for name, spec in specs.items() if name.endswith(".scale")}
    assert set(specs) - set(scales) == set(weights)
    assert len(scales) == sum(entry.quantisable for entry in weights.values()) == 322
    assert {spec.dtypes for spec in scales.values()} == {frozenset({"F8_E8M0"})}


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.0.attn.wq_b.weight", (128, 32), "F8_E4M3"),
        ("layers.0.attn.wq_b.scale", (4, 1), "F8_E8M0"),
        ("layers.3.ffn.experts.7.w1.weight", (32, 32), "I8"),
        ("layers.3.ffn.experts.7.w1.scale", (32, 2), "F8_E8M0"),
        ("layers.3.ffn.experts.7.w2.weight", (64, 16), "I8"),
        ("layers.3.ffn.experts.7.w2.scale", (64, 1), "F8_E8M0"),
        ("layers.3.ffn.shared_experts.w2.scale", (2, 1), "F8_E8M0"),
        ("layers.1.engram.embed.weight", (4096, 32), "F8_E4M3"),
        ("layers.1.engram.embed.scale", (4096, 1), "F8_E8M0"),
        ("layers.1.engram.wkv.scale", (10, 4), "F8_E8M0"),
        ("mtp.0.main_proj.scale", (2, 6), "F8_E8M0"),
    ],
)
def test_released_shapes(name: str, shape: tuple[int, ...], dtype: str) -> None:
    specs = expected_tensors(text_config(), encoding="released")
    assert specs[name] == TensorSpec(shape, frozenset({dtype}))


def test_released_tensors_that_stay_floating() -> None:
    specs = expected_tensors(text_config(), encoding="released")
    for name in ("embed.weight", "head.weight", "norm.weight", "layers.2.attn.compressor.wkv.weight"):
        assert specs[name].dtypes == FLOATS
        assert name.removesuffix(".weight") + ".scale" not in specs


def test_the_released_main_proj() -> None:
    """Reported from the shard header: F8_E4M3 [5120, 15360] with F8_E8M0 [160, 480]."""
    specs = expected_tensors(V41Config.from_dict(config("released")), encoding="released")
    assert specs["mtp.0.main_proj.weight"] == TensorSpec((5120, 15360), frozenset({"F8_E4M3"}))
    assert specs["mtp.0.main_proj.scale"] == TensorSpec((160, 480), frozenset({"F8_E8M0"}))


def test_optional_tensors_stay_optional() -> None:
    assert stored("a.weight", Entry((1, 96), optional=True), "fp32")["a.weight"].optional
    assert all(
        spec.optional for spec in stored("a.weight", Entry((32, 96), Kind.DENSE, True), "released").values()
    )


def test_verification_is_part_of_the_layout() -> None:
    assert layout.verify_headers is verify.verify_headers
