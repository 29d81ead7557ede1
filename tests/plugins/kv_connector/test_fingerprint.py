"""Fingerprint: which engines share, and which never do."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins.kv_connector.fingerprint import (
    checkpoint_digest,
    engine_fingerprint,
    shards,
    tokenizer_identity,
    weights_identity,
)
from vllm_deepinfer_plugins.kv_connector.groups import StoredGroup

from vllm_deepinfer.errors import UserError

GROUP = StoredGroup(0, 16, None, ("a",), (64,))


def safetensors(path: Path, **tensors: bytes) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def checkpoint(folder: Path, **tensors: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors(folder / "model.safetensors", **(tensors or {"w": bytes(20_000), "v": b"x" * 20_000}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config(model: Path | str, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": None,
        "cache_dtype": "auto",
        "hf": {"hidden_size": 64, "_name_or_path": str(model)},
        "additional": {},
        "load_format": "auto",
        "seed": 0,
        "tensor": 1,
        "pipeline": 1,
        "revision": None,
        "tokenizer": model,
        **changes,
    }
    hf = SimpleNamespace(to_dict=lambda: values["hf"])
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            tokenizer=str(values["tokenizer"]),
            hf_config=hf,
            dtype=values["dtype"],
            quantization=values["quantization"],
            seed=values["seed"],
            revision=values["revision"],
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"]),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tensor"],
            pipeline_parallel_size=values["pipeline"],
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        additional_config={"deepinfer": values["additional"]},
    )


def kv(layout: str = "NHD", replicas: int = 1) -> Any:
    return SimpleNamespace(kv_cache_layout=layout, kv_tp_replicas=replicas)


def test_two_copies_of_a_checkpoint_share(tmp_path: Path) -> None:
    found = {
        engine_fingerprint(config(checkpoint(tmp_path / name)), kv(), (GROUP,), 64, None)
        for name in ("a", "b")
    }
    assert len(found) == 1 and len(found.pop()) == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"hf": {"hidden_size": 65}},
        {"additional": {"batch_invariant": True}},
        {"tensor": 2},
        {"tokenizer": "another"},
    ],
)
def test_what_changes_the_kv_changes_the_fingerprint(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = checkpoint(tmp_path / "m")
    before = engine_fingerprint(config(model), kv(), (GROUP,), 64, None)
    assert engine_fingerprint(config(model, **changes), kv(), (GROUP,), 64, None) != before


def test_layout_groups_run_length_and_name_of_the_weights_count(tmp_path: Path) -> None:
    model = config(checkpoint(tmp_path / "m"))
    wide = StoredGroup(0, 16, None, ("a",), (128,))
    made = [
        engine_fingerprint(model, kv(), (GROUP,), 64, None),
        engine_fingerprint(model, kv("HND"), (GROUP,), 64, None),
        engine_fingerprint(model, kv(), (wide,), 64, None),
        engine_fingerprint(model, kv(), (GROUP,), 128, None),
        engine_fingerprint(model, kv(), (GROUP,), 64, "v2"),
    ]
    assert len(set(made)) == len(made)


def test_one_byte_at_an_end_of_any_tensor_is_another_checkpoint(tmp_path: Path) -> None:
    made = set()
    for i, place in enumerate((None, 0, 19_999)):
        data = bytearray(20_000)
        if place is not None:
            data[place] = 1
        made.add(checkpoint_digest(checkpoint(tmp_path / str(i), w=bytes(data), v=bytes(20_000))))
        made.add(checkpoint_digest(checkpoint(tmp_path / str(i), w=bytes(20_000), v=bytes(data))))
    assert len(made) == 5


def test_other_files_of_weights_are_sampled_too(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(10_000))
    before = checkpoint_digest(tmp_path)
    (tmp_path / "model.bin").write_bytes(bytes(9_999) + b"1")
    assert checkpoint_digest(tmp_path) != before
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 50)
    assert len(checkpoint_digest(tmp_path)) == 64, "a file whose header lies is sampled like any other"


def test_where_the_weights_come_from() -> None:
    assert weights_identity(config("org/m", load_format="dummy", seed=3)) == "dummy seed 3"
    assert weights_identity(config("org/m", revision="abc")) == "org/m@abc"
    with pytest.raises(UserError, match='write "weights_id"') as caught:
        weights_identity(config("org/m"))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_its_files(tmp_path: Path) -> None:
    assert tokenizer_identity("org/m") == "org/m"
    one, two = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert tokenizer_identity(str(one)) == tokenizer_identity(str(two))
    (two / "tokenizer_config.json").write_text('{"x": 1}')
    assert tokenizer_identity(str(one)) != tokenizer_identity(str(two))


def test_ranks_that_hold_the_same_count_once() -> None:
    assert shards(config("m", tensor=8), kv(replicas=8)) == 1
    assert shards(config("m", tensor=8), kv(replicas=2)) == 4
    with pytest.raises(UserError, match="set pipeline_parallel_size to 1"):
        shards(config("m", pipeline=2), kv())
