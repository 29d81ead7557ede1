from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.errors import CheckpointError
from vllm_deepinfer.checkpoint.files import Header, write_file
from vllm_deepinfer.checkpoint.layout import Encoding, expected_tensors
from vllm_deepinfer.checkpoint.verify import INDEX, read_folder, verify_headers
from vllm_deepinfer.errors import UserError

from .samples import config, sentence, text

Headers = dict[str, Header]


def tiny(**changes: Any) -> V41Config:
    return V41Config.from_dict({**config("tiny"), "text_config": text("tiny", **changes)})


def with_draft(**changes: Any) -> V41Config:
    return V41Config.from_dict({**config(), "text_config": text(**changes)})


def headers(model: V41Config, encoding: Encoding = "fp32", dtype: str = "F32") -> Headers:
    """The headers of a faultless checkpoint."""
    specs = expected_tensors(model, encoding=encoding)
    return {
        name: Header(dtype if dtype in spec.dtypes else next(iter(spec.dtypes)), spec.shape)
        for name, spec in specs.items()
    }


def write(folder: Path, content: Headers, name: str = "model.safetensors") -> Path:
    """Write a checkpoint of zeros."""
    folder.mkdir(exist_ok=True)
    kinds = {1: np.uint8, 2: np.uint16, 4: np.float32}
    arrays = (
        (tensor, np.zeros(header.shape, dtype=kinds[Header(header.dtype, (1,)).nbytes]))
        for tensor, header in content.items()
    )
    write_file(folder / name, content, arrays)
    return folder


def refused(folder: Path, model: V41Config) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify_headers(folder, model)
    return sentence(caught.value)


@pytest.mark.parametrize("model", [tiny(), with_draft(), tiny(candidate_source_layer_id=-1)])
@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [("fp32", "F32"), ("bf16", "BF16"), ("bf16", "F16"), ("released", "BF16"), ("released", "F32")],
)
def test_faultless(tmp_path: Path, model: V41Config, encoding: Encoding, dtype: str) -> None:
    verify_headers(write(tmp_path, headers(model, encoding, dtype)), model)
    verify_headers(str(tmp_path), model)


def test_each_tensor_may_have_a_form_of_its_own(tmp_path: Path) -> None:
    quantised, plain = headers(tiny(), "released"), headers(tiny(), "bf16", "BF16")
    mixed = {name: header for name, header in quantised.items() if ".attn." not in name}
    mixed |= {name: header for name, header in plain.items() if ".attn." in name}
    verify_headers(write(tmp_path, mixed), tiny())


def test_the_vision_tower_is_legal(tmp_path: Path) -> None:
    vision = {
        "vision.layers.0.wqkv.weight": Header("BF16", (3, 2)),
        "aligner.weight": Header("F32", (2,)),
        **dict.fromkeys(("image_start", "image_end", "image_newline"), Header("BF16", (64,))),
    }
    verify_headers(write(tmp_path, headers(tiny()) | vision), tiny())


def test_the_confidence_head_is_optional(tmp_path: Path) -> None:
    content = headers(with_draft())
    del content["mtp.2.confidence_head.proj.weight"]
    verify_headers(write(tmp_path, content), with_draft())


def edited(edit: Callable[[Headers], object], encoding: Encoding = "fp32") -> Headers:
    content = headers(tiny(), encoding)
    edit(content)
    return content


@pytest.mark.parametrize(
    ("encoding", "edit", "expected"),
    [
        (
            "fp32",
            lambda c: c.pop("layers.3.attn.wq_a.weight"),
            "the checkpoint lacks layers.3.attn.wq_a.weight: add what is missing, as config.json implies",
        ),
        (
            "fp32",
            lambda c: [c.pop(f"layers.6.ffn.experts.{e}.w1.weight") for e in range(8)],
            "the checkpoint lacks layers.6.ffn.experts.0.w1.weight and 7 more tensors: add what is missing",
        ),
        (
            "fp32",
            lambda c: c.update({"layers.8.attn_norm.weight": Header("F32", (64,))}),
            "the checkpoint holds layers.8.attn_norm.weight that config.json does not describe",
        ),
        (
            "fp32",
            lambda c: c.update(
                {"model.embed.weight": Header("F32", (1,)), "lm_head.weight": Header("F32", (1,))}
            ),
            "the checkpoint holds model.embed.weight and 1 more tensor that config.json does not describe",
        ),
        (
            "fp32",
            lambda c: c.update({"layers.3.attn.compressor.wkv.weight": Header("F32", (32, 64))}),
            "the checkpoint holds layers.3.attn.compressor.wkv.weight that config.json does not describe",
        ),
        (
            "fp32",
            lambda c: c.update({"layers.0.attn.wkv.weight": Header("F32", (64, 32))}),
            "layers.0.attn.wkv.weight has the shape [64, 32], but config.json implies [32, 64]: ",
        ),
        (
            "fp32",
            lambda c: c.update({"layers.0.attn.attn_sink": Header("F32", (4, 1))}),
            "layers.0.attn.attn_sink has the shape [4, 1], but config.json implies [4]: ",
        ),
        (
            "fp32",
            lambda c: c.update({"layers.1.engram.embed.weight": Header("F32", (4095, 32))}),
            "layers.1.engram.embed.weight has the shape [4095, 32], but config.json implies [4096, 32]: ",
        ),
        (
            "fp32",
            lambda c: c.update({"norm.weight": Header("I8", (64,))}),
            "norm.weight has the type I8: store it as one of BF16, F16, F32",
        ),
        (
            "fp32",
            lambda c: c.update({"layers.0.attn.wkv.weight": Header("I8", (32, 32))}),
            "layers.0.attn.wkv.weight has the type I8: store it as one of BF16, F16, F32, F8_E4M3",
        ),
        (
            "fp32",
            lambda c: c.update({"layers.0.attn.wkv.scale": Header("F8_E8M0", (1, 2))}),
            "the checkpoint holds layers.0.attn.wkv.scale, but the weight beside it is not quantised: drop "
            "it",
        ),
        (
            "released",
            lambda c: c.pop("layers.0.attn.wkv.scale"),
            "layers.0.attn.wkv.weight is quantised, but layers.0.attn.wkv.scale is missing: add the scale",
        ),
        (
            "released",
            lambda c: c.pop("layers.0.attn.wkv.weight"),
            "the checkpoint lacks layers.0.attn.wkv.weight: ",
        ),
        (
            "released",
            lambda c: c.update({"layers.0.attn.wkv.scale": Header("F32", (1, 2))}),
            "layers.0.attn.wkv.scale has the type F32: store it as F8_E8M0",
        ),
        (
            "released",
            lambda c: c.update({"layers.0.attn.wq_b.scale": Header("F8_E8M0", (1, 1))}),
            "layers.0.attn.wq_b.scale has the shape [1, 1], but config.json implies [4, 1]: ",
        ),
        (
            "released",
            lambda c: c.update({"layers.0.ffn.experts.0.w1.weight": Header("I8", (32, 64))}),
            "layers.0.ffn.experts.0.w1.weight has the shape [32, 64], but config.json implies [32, 32]: ",
        ),
        (
            "released",
            lambda c: c.update({"layers.0.ffn.experts.0.w1.weight": Header("F8_E4M3", (32, 64))}),
            "layers.0.ffn.experts.0.w1.weight has the type F8_E4M3: store it as one of BF16, F16, F32, I8",
        ),
        (
            "released",
            lambda c: c.update({"embed.scale": Header("F8_E8M0", (1, 1))}),
            "the checkpoint holds embed.scale that config.json does not describe",
        ),
    ],
)
def test_faults(tmp_path: Path, encoding: Encoding, edit: Callable[[Headers], object], expected: str) -> None:
    assert refused(write(tmp_path, edited(edit, encoding)), tiny()).startswith(expected)


def test_draft_blocks_that_the_config_announces_must_be_there(tmp_path: Path) -> None:
    content = {name: header for name, header in headers(with_draft()).items() if not name.startswith("mtp.")}
    message = refused(write(tmp_path, content), with_draft())
    assert message.startswith("the checkpoint lacks mtp.0.attn_norm.weight and ")
    assert message.endswith("set num_nextn_predict_layers to 0 for no drafter")


def test_draft_blocks_that_nobody_announced(tmp_path: Path) -> None:
    message = refused(write(tmp_path, headers(with_draft())), with_draft(num_nextn_predict_layers=0))
    assert message.startswith("the checkpoint holds mtp.0.attn_norm.weight and ")


def test_backbone_and_draft_missing_together_do_not_suggest_dropping_the_drafter(tmp_path: Path) -> None:
    content = headers(with_draft())
    del content["mtp.1.attn_norm.weight"], content["embed.weight"]
    assert "no drafter" not in refused(write(tmp_path, content), with_draft())


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert refused(tmp_path, tiny()).startswith(f"{tmp_path} has neither {INDEX} nor model.safetensors: ")


def test_other_files_beside_the_single_file_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, headers(tiny()))
    write(tmp_path, {"logits.5": Header("F32", (5,))}, "golden.safetensors")
    verify_headers(tmp_path, tiny())


def sharded(folder: Path, model: V41Config, files: int = 3) -> dict[str, str]:
    content = headers(model)
    weight_map: dict[str, str] = {}
    for number in range(files):
        part = dict(list(content.items())[number::files])
        write(folder, part, f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_several_files(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, with_draft())
    verify_headers(tmp_path, with_draft())
    assert set(read_folder(tmp_path)) == set(weight_map)


def test_an_index_names_an_absent_file(tmp_path: Path) -> None:
    sharded(tmp_path, tiny())
    (tmp_path / "part-1.safetensors").unlink()
    assert refused(tmp_path, tiny()).startswith(
        f"{tmp_path / INDEX} names part-1.safetensors, which is not there: "
    )


def test_a_truncated_file(tmp_path: Path) -> None:
    sharded(tmp_path, tiny())
    file = tmp_path / "part-2.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(tmp_path, tiny()).startswith(f"{file} has ")


def test_an_index_names_a_tensor_that_its_file_lacks(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, tiny())
    write_index(tmp_path, weight_map | {"more.weight": "part-0.safetensors"})
    assert refused(tmp_path, tiny()).startswith("part-0.safetensors lacks more.weight that the index names: ")


def test_a_file_holds_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, tiny())
    del weight_map["norm.weight"]
    write_index(tmp_path, weight_map)
    message = refused(tmp_path, tiny())
    assert "holds norm.weight, but the index says otherwise: " in message


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
    ],
)
def test_no_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert refused(tmp_path, tiny()).startswith(f"{tmp_path / INDEX} is no index of safetensors files (")


def test_the_command_line_shows_the_sentence_alone() -> None:
    assert issubclass(CheckpointError, UserError)
