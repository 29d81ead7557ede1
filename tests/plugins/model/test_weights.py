"""Released weights: decoded bit for bit as the checkpoint package's numpy does, and refused by name."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_deepinfer_plugins.model.weights import decoded, dequantize, load_backbone, load_into, read_tensors

from vllm_deepinfer.checkpoint import encoding
from vllm_deepinfer.checkpoint.errors import CheckpointError
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint

from .engines import FIXTURES, NAMES
from .samples import backbone, noise, tiny, token_ids, variant

Tensors = dict[str, torch.Tensor]


def sentence(error: pytest.ExceptionInfo[Exception]) -> str:
    message = str(error.value)
    assert "\n" not in message and ". " not in message
    return message


def from_numpy(weight: Any, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from the encoders as a checkpoint's tensors."""
    codes = torch.from_numpy(weight)
    codes = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return codes, torch.from_numpy(scale).view(torch.float8_e8m0fnu)


def as_numpy(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


def values(rows: int, columns: int, seed: int = 0) -> Any:
    """Normal values whose blocks are of very different sizes."""
    generator = np.random.default_rng(seed)
    size = np.exp2(generator.integers(-20, 20, size=(rows, 1)))
    return (generator.normal(size=(rows, columns)) * size).astype(np.float32)


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (32, 32), (64, 96), (33, 64), (70, 50), (5, 3)])
def test_dense_blocks(rows: int, columns: int) -> None:
    weight, scale = encoding.quantize_dense(values(rows, columns))
    found = dequantize(*from_numpy(weight, scale), torch.float32)
    assert found.tolist() == encoding.dequantize_fp8(weight, scale).tolist()


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (32, 32), (33, 64), (200, 96)])
def test_a_scale_per_row(rows: int, columns: int) -> None:
    weight, scale = encoding.quantize_rows(values(rows, columns))
    found = dequantize(*from_numpy(weight, scale), torch.float32)
    assert found.tolist() == encoding.dequantize_fp8(weight, scale).tolist()


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (32, 32), (33, 64), (200, 96)])
def test_two_experts_codes_in_a_byte(rows: int, columns: int) -> None:
    weight, scale = encoding.quantize_mxfp4(values(rows, columns))
    codes, scales = from_numpy(weight, scale)
    found = dequantize(codes, scales, torch.float32)
    assert found.tolist() == encoding.dequantize_mxfp4(weight, scale).tolist()
    assert torch.equal(dequantize(codes.view(torch.uint8), scales, torch.float32), found)


def test_every_code_by_hand() -> None:
    """The even column lies in the low half of a byte; code 8 is minus zero."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    found = dequantize(packed, torch.tensor([[0.5]]).to(torch.float8_e8m0fnu), torch.float32)
    half = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    assert found.tolist() == [(half + [-value for value in half]) * 2]


@pytest.mark.parametrize(
    "quantise", [encoding.quantize_dense, encoding.quantize_rows, encoding.quantize_mxfp4]
)
def test_bfloat16_loses_nothing(quantise: Any) -> None:
    weight, scale = from_numpy(*quantise(values(64, 96)))
    exact = dequantize(weight, scale, torch.float32)
    assert torch.equal(dequantize(weight, scale, torch.bfloat16).float(), exact)


# A stream of tensors


def stream() -> Tensors:
    dense = from_numpy(*encoding.quantize_dense(values(64, 64)))
    expert = from_numpy(*encoding.quantize_mxfp4(values(64, 64, seed=1)))
    return {
        "a.weight": dense[0],
        "a.scale": dense[1],
        "b.weight": expert[0],
        "b.scale": expert[1],
        "norm.weight": noise(64),
        "layers.0.hc_attn_scale": noise(3),
    }


def test_weight_and_scale_in_any_order() -> None:
    tensors = stream()
    wanted = dict(decoded(tensors.items(), torch.float32))
    assert set(wanted) == {"a.weight", "b.weight", "norm.weight", "layers.0.hc_attn_scale"}
    assert torch.equal(wanted["a.weight"], dequantize(tensors["a.weight"], tensors["a.scale"], torch.float32))
    assert wanted["norm.weight"] is tensors["norm.weight"]
    for order in itertools.islice(itertools.permutations(tensors), 0, None, 37):
        found = dict(decoded(((name, tensors[name]) for name in order), torch.float32))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("missing", ["a.scale", "a.weight", "b.scale", "b.weight"])
def test_a_weight_without_its_scale(missing: str) -> None:
    tensors = stream()
    del tensors[missing]
    with pytest.raises(ValueError, match="has no partner") as error:
        list(decoded(tensors.items(), torch.float32))
    assert sentence(error).startswith(missing[:2])


# Into a model


def released(folder: Path, **options: Any) -> Path:
    return tiny(folder, encoding="released", vocab=512, dspark_blocks=1, **options)


def dequantised_twin(source: Path, target: Path) -> Path:
    """The same checkpoint in plain float32, by the numpy decoders."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors, plain = dict(read_tensors(source)), {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if tensor.dtype == torch.int8 and scale is not None:
            plain[name] = torch.from_numpy(encoding.dequantize_mxfp4(tensor.numpy(), as_numpy(scale)))
        elif tensor.dtype == torch.float8_e4m3fn and scale is not None:
            plain[name] = torch.from_numpy(encoding.dequantize_fp8(as_numpy(tensor), as_numpy(scale)))
        elif tensor.dtype != torch.float8_e8m0fnu:
            plain[name] = tensor.float()
    save_file(plain, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return target


@torch.no_grad()
def test_the_released_encoding_is_its_dequantised_twin(tmp_path: Path) -> None:
    quantised = released(tmp_path)
    kinds = {tensor.dtype for _, tensor in read_tensors(quantised)}
    assert {torch.float8_e4m3fn, torch.int8, torch.float8_e8m0fnu, torch.bfloat16, torch.float32} == kinds
    ours, twin = load_backbone(quantised), load_backbone(dequantised_twin(quantised, tmp_path / "twin"))
    others = dict(twin.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, others[name]), name
        assert float(parameter.abs().sum()) > 0, name
    ids = token_ids(40).unsqueeze(0)
    logits = ours.whole(ids)
    assert torch.equal(logits, twin.whole(ids))
    assert float(logits.std()) > 1
    narrow = load_backbone(quantised, torch.bfloat16)
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter.float(), others[name]), name


@torch.no_grad()
def test_shards_make_no_difference(tmp_path: Path) -> None:
    options = TinyOptions(vocab=512, layers=4)
    write_checkpoint(tmp_path / "one", options)
    assert write_checkpoint(tmp_path / "many", options, shard_bytes=100_000).shards > 5
    one, many = (dict(load_backbone(tmp_path / name).named_parameters()) for name in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_files_that_are_no_weights_stay_unread() -> None:
    """The fixture's folder holds golden.safetensors too."""
    names = {name for name, _ in read_tensors(FIXTURES / NAMES[0])}
    assert "embed.weight" in names and not any(name.startswith(("ids.", "logits.")) for name in names)
    assert (FIXTURES / NAMES[0] / "golden.safetensors").is_file()


def test_experts_are_stacked() -> None:
    tensors, model = load_file(FIXTURES / NAMES[0] / "model.safetensors"), backbone()
    experts = model.layers[3].ffn.experts
    for expert in range(8):
        stem = f"layers.3.ffn.experts.{expert}"
        assert torch.equal(experts.gate_up[expert, :32], tensors[f"{stem}.w1.weight"])
        assert torch.equal(experts.gate_up[expert, 32:], tensors[f"{stem}.w3.weight"])
        assert torch.equal(experts.down[expert], tensors[f"{stem}.w2.weight"])
    assert torch.equal(model.layers[2].hc_ffn.scale, tensors["layers.2.hc_ffn_scale"])


def test_drafter_and_vision_pass_by() -> None:
    model = variant(NAMES[2])
    extra = {"vision.patch.weight": noise(2), "aligner.w": noise(2), "image_newline": noise(2)}
    names = load_into(model, [*read_tensors(FIXTURES / NAMES[2]), *extra.items()], torch.float32)
    assert names == {name for name, _ in model.named_parameters()}
    assert any(name.startswith("mtp.") for name, _ in read_tensors(FIXTURES / NAMES[2]))


def test_what_was_filled_is_reported() -> None:
    tensors = [item for item in read_tensors(FIXTURES / NAMES[0]) if "layers.7." not in item[0]]
    model = variant()
    missing = {name for name, _ in model.named_parameters()} - load_into(model, tensors, torch.float32)
    assert missing == {name for name, _ in model.named_parameters() if name.startswith("layers.7.")}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layers.0.attn.wq_c.weight", noise(2, 2), "layers.0.attn.wq_c.weight belongs to no parameter"),
        ("norm.weight", noise(65), r"norm.weight has the shape \[65\], but config.json implies \[64\]"),
        ("layers.9.norm.weight", noise(64), "layers.9.norm.weight belongs to no parameter"),
        ("layers.0.ffn.experts.0.w3.weight", noise(32, 65), r"has the shape \[32, 65\].*\[32, 64\]"),
        ("layers.0.ffn.experts.0.w2.weight", noise(64, 31), r"has the shape \[64, 31\].*\[64, 32\]"),
    ],
)
def test_tensors_that_fit_nowhere(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_into(variant(), [(name, tensor)], torch.float32)
    sentence(error)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("layers.0.ffn.experts.8.w1.weight", noise(32, 64)),  # one expert too many
        ("layers.9.ffn.experts.0.w1.weight", noise(32, 64)),  # one of no layer
    ],
)
def test_experts_that_fit_nowhere(name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"{name} belongs to no parameter") as error:
        load_into(variant(), [(name, tensor)], torch.float32)
    sentence(error)


def damaged(folder: Path, drop: str | None = None, **replace: torch.Tensor) -> Path:
    shutil.copytree(FIXTURES / NAMES[0], folder, ignore=shutil.ignore_patterns("golden*"))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if name != drop} | replace
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("drop", "replace", "message"),
    [
        ("layers.2.attn.compressor.wgate.weight", {}, "lacks layers.2.attn.compressor.wgate.weight"),
        (None, {"layers.2.extra": noise(1)}, "holds layers.2.extra"),
        (None, {"norm.weight": noise(32)}, r"norm.weight has the shape \[32\]"),
        (None, {"norm.weight": noise(64).to(torch.float8_e4m3fn)}, "norm.weight has the type F8_E4M3"),
    ],
)
def test_before_any_weight_is_read(tmp_path: Path, drop: str, replace: Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        load_backbone(damaged(tmp_path / "x", drop, **replace))
    sentence(error)
