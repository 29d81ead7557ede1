"""The digest changes with what would make KV unreadable, and with nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

layout = pytest.importorskip("vllm_deepinfer_plugins.hand_over.layout")
settings = pytest.importorskip("vllm_deepinfer_plugins.hand_over.settings")


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def config_of(folder: Path, **changes: Any) -> Any:
    values = {
        "dtype": "float32",
        "cache": "auto",
        "block": 128,
        "pp": 1,
        "layers": 8,
        "module": settings.MODULE,
    }
    values |= changes
    transfer = SimpleNamespace(
        kv_connector_module_path=values["module"], kv_connector_extra_config=values.get("extra", {})
    )
    hf = HfConfig(num_hidden_layers=values["layers"], _name_or_path=values.get("path", "x"))
    return SimpleNamespace(
        kv_transfer_config=transfer if values["module"] != "none" else None,
        model_config=SimpleNamespace(hf_config=hf, model=str(folder), revision=None, dtype=values["dtype"]),
        cache_config=SimpleNamespace(cache_dtype=values["cache"], block_size=values["block"]),
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["pp"]),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=values.get("flat", False)),
        speculative_config=values.get("speculative"),
        additional_config={"deepinfer": {"encoder_replay": values.get("replay")}},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"cache": "fp8"},
        {"block": 64},
        {"pp": 2},
        {"layers": 9},
        {"flat": True},
        {"replay": True},
        {"speculative": SimpleNamespace(method="dspark", num_speculative_tokens=3)},
    ],
)
def test_it_changes_with(folder: Path, change: dict[str, Any]) -> None:
    assert layout.kv_layout(config_of(folder, **change)) != layout.kv_layout(config_of(folder))


def test_it_does_not_change_with_the_place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    ours, theirs = config_of(folder, path="here"), config_of(copy, path="there")
    assert layout.kv_layout(ours) == layout.kv_layout(theirs) != ""


@pytest.mark.parametrize("at", [0, 51_200, 102_399])
def test_it_changes_with_the_weights(folder: Path, at: int) -> None:
    """A fine-tune has the same shapes; samples are taken at both ends and between."""
    before = layout.kv_layout(config_of(folder))
    path = folder / "model.safetensors"
    changed = bytearray(path.read_bytes())
    for place in range(max(at - 20_000, 0), min(at + 20_000, len(changed))):
        changed[place] ^= 255
    path.write_bytes(bytes(changed))
    assert layout.kv_layout(config_of(folder)) != before


@pytest.mark.parametrize("module", ["none", "some.other.connector"])
def test_an_engine_without_our_connector_has_none(folder: Path, module: str) -> None:
    config = config_of(folder, module=module)
    assert layout.kv_layout(config) == "" and not layout.hands_over(config)


def in_store(**extra: Any) -> dict[str, Any]:
    return {"module": settings.STORE_MODULE, "extra": {"store": "/kv", "hand_over": True, **extra}}


def test_a_store_hands_over_where_it_is_told_to(folder: Path) -> None:
    assert layout.hands_over(config_of(folder, **in_store()))
    assert not layout.hands_over(config_of(folder, **in_store(hand_over=False)))
    assert layout.kv_layout(config_of(folder, **in_store(hand_over=False))) == ""


@pytest.mark.parametrize("extra", [{"store": "/other"}, {"run_tokens": 64}, {"weights_id": "mine"}])
def test_two_stores_are_two_layouts(folder: Path, extra: dict[str, Any]) -> None:
    ours = layout.kv_layout(config_of(folder, **in_store()))
    assert ours == layout.kv_layout(config_of(folder, **in_store(capacity="1GiB"))) != ""
    assert ours != layout.kv_layout(config_of(folder, **in_store(**extra)))
    assert ours != layout.kv_layout(config_of(folder))


def test_a_child_of_a_multi_connector_hands_over(folder: Path) -> None:
    """With NIXL alone at the other end it is the same layout."""
    nixl = {"kv_connector_module_path": settings.MODULE}
    store = {"kv_connector_module_path": settings.STORE_MODULE, "kv_connector_extra_config": {"store": "/kv"}}
    both = {"module": f"{settings.STORE_MODULE}.multi", "extra": {"connectors": [nixl, store]}}
    assert layout.hands_over(config_of(folder, **both))
    assert layout.kv_layout(config_of(folder, **both)) == layout.kv_layout(config_of(folder))
    alone = {"module": f"{settings.STORE_MODULE}.multi", "extra": {"connectors": [store]}}
    assert not layout.hands_over(config_of(folder, **alone))
