"""What the portable class refuses: one sentence each, before any weight is loaded."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig
from vllm_deepinfer_plugins.model import config_hook
from vllm_deepinfer_plugins.model.config_hook import NATIVE_NAME, PORTABLE_NAME, V41ConfigHook, refuse
from vllm_deepinfer_plugins.settings import SettingsError

from vllm_deepinfer.errors import UserError

from .engines import NAMES, checkpoint
from .samples import config_fields

Change = dict[str, Any]


class HfConfig(SimpleNamespace):
    """A transformers config as far as the hook sees it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields=fields, architectures=fields["architectures"])
        if "quantization_config" in fields:
            self.quantization_config = fields["quantization_config"]

    def to_dict(self) -> dict[str, Any]:
        return self.fields


@dataclasses.dataclass
class Arch:
    is_deepseek_mla: bool = True
    quantization_config: Any = None
    head_size: int = 7


def engine_config(folder: Path | str = "/nowhere", text: Change | None = None, **changes: Any) -> Any:
    """A legal config; ``changes`` name attributes of its parts."""
    fields = copy.deepcopy(config_fields())
    fields["text_config"] |= text or {}
    hf = HfConfig(fields)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, worker_cls="auto"),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        use_v2_model_runner=False,
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=16, swa_bounded_replay=True, enable_prefix_caching=True
        ),
        model_config=SimpleNamespace(
            dtype=torch.float32,
            model=str(folder),
            tokenizer=None,
            tokenizer_revision=None,
            hf_config=hf,
            hf_text_config=hf,
            quantization=None,
            model_arch_config=Arch(),
        ),
        lora_config=None,
        kv_transfer_config=None,
        speculative_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        additional_config={},
    )
    for name, value in changes.items():
        for part in (
            config.parallel_config,
            config.cache_config,
            config.model_config,
            config.load_config,
            config,
        ):
            if hasattr(part, name):
                setattr(part, name, value)
    return config


def refusal(config: Any) -> str:
    with pytest.raises(UserError) as error:
        refuse(config)
    message = str(error.value)
    assert "\n" not in message and ". " not in message and ": " in message
    return message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16},
        {"cache_dtype": "bfloat16"},
        {"block_size": None},
        {"block_size": 2},
        {"block_size": 258},
    ],
)
def test_legal(changes: Change) -> None:
    refuse(engine_config(**changes))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"tensor_parallel_size": 2}, ["--tensor-parallel-size is 2", "write that", "1 only"]),
        ({"pipeline_parallel_size": 4}, ["--pipeline-parallel-size is 4", "1 only"]),
        ({"lora_config": object()}, ["--enable-lora", "leave the flag out"]),
        ({"cache_dtype": "fp8"}, ["--kv-cache-dtype is fp8", "write auto"]),
        ({"dtype": torch.float16}, ["--dtype is float16", "bfloat16 or float32"]),
        ({"block_size": 17}, ["--block-size is 17", "compress_ratios[2] = 2", "write a multiple"]),
        ({"block_size": 1}, ["--block-size is 1", "compress_ratios[2] = 2"]),
    ],
)
def test_what_the_class_cannot_do(changes: Change, parts: list[str]) -> None:
    message = refusal(engine_config(**changes))
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ({"kv_source_layer_ids": [4]}, ["text_config.kv_source_layer_ids", "at or before 2"]),
        ({"candidate_source_layer_id": 6}, ["text_config.candidate_source_layer_id is 6", "no KV source"]),
        ({"compress_ratios": [0, 0, 2]}, ["text_config.compress_ratios has 3 entries for 8 layers"]),
        ({"engram_num_embeddings": []}, ["text_config.engram_num_embeddings"]),
        ({"engram_head_dim": 0}, ["text_config.engram_head_dim"]),
        ({"hidden_size": "64"}, ["text_config.hidden_size cannot be read"]),
        ({"o_groups": 3}, ["text_config.o_groups is 3", "divide"]),
    ],
)
def test_configs_that_make_no_model(text: Change, parts: list[str]) -> None:
    message = refusal(engine_config(text=text))
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("drop", "add", "part"),
    [
        ("layers.4.attn.indexer.wk.weight", {}, "lacks layers.4.attn.indexer.wk.weight"),
        (None, {"layers.0.attn.indexer.wk.weight": torch.zeros(1)}, "holds layers.0.attn.indexer.wk.weight"),
        (None, {"head.weight": torch.zeros(512, 63)}, "head.weight has the shape [512, 63]"),
    ],
)
def test_checkpoints_that_do_not_fit(
    tmp_path: Path, drop: str | None, add: dict[str, torch.Tensor], part: str
) -> None:
    folder = checkpoint(NAMES[0], tmp_path)
    refuse(engine_config(folder))
    tensors = load_file(folder / "model.safetensors") | add
    save_file({k: v for k, v in tensors.items() if k != drop}, folder / "model.safetensors")
    assert part in refusal(engine_config(folder))
    refuse(engine_config(folder, load_format="dummy"))


def test_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    folder = checkpoint(NAMES[0], tmp_path)
    config = engine_config(folder, {"engram_compressed_vocab_size": 419})
    assert refusal(config).startswith("text_config.engram_compressed_vocab_size is 419, but the tokenizer's")
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(engine_config(folder, load_format="dummy"))
    other = tmp_path / "other"
    other.mkdir()
    assert f"{other} has no tokenizer.json" in refusal(engine_config(tokenizer=str(other)))
    refuse(engine_config(folder, {"engram_layer_ids": [], "engram_num_embeddings": []}, load_format="dummy"))


def test_a_quantisation_that_nobody_would_apply() -> None:
    config = engine_config(quantization="awq")
    with pytest.raises(UserError, match=r"--quantization is awq, but .*: leave the flag out"):
        V41ConfigHook.verify_and_update_model_config(config.model_config)


def test_a_damaged_file(tmp_path: Path) -> None:
    folder = checkpoint(NAMES[0], tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors" in refusal(engine_config(folder))
    shutil.rmtree(folder)
    refuse(engine_config(folder))  # a name of a repository: nothing to look at here


# The hook itself


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a native class; returns what vLLM's own hook was asked."""
    calls: list[str] = []
    monkeypatch.setattr(config_hook, "native_class_exists", lambda: True)
    for name in ("verify_and_update_config", "verify_and_update_model_config"):
        monkeypatch.setattr(
            DeepseekV4ForCausalLMConfig, name, staticmethod(lambda config, name=name: calls.append(name))
        )
    return calls


def quantised(**changes: Any) -> Any:
    config = engine_config(**changes)
    config.model_config.hf_config.quantization_config = {"quant_method": "fp8"}
    return config


def test_on_a_cpu_three_things_are_corrected() -> None:
    config = quantised()
    V41ConfigHook.verify_and_update_model_config(config.model_config)
    assert config.model_config.model_arch_config == Arch(False, None)
    assert not hasattr(config.model_config.hf_config, "quantization_config")
    V41ConfigHook.verify_and_update_config(config)
    assert config.model_config.hf_config.architectures == [NATIVE_NAME]


def test_an_arch_config_that_is_no_dataclass() -> None:
    config = quantised(model_arch_config=SimpleNamespace(is_deepseek_mla=True, quantization_config={"x": 1}))
    V41ConfigHook.verify_and_update_model_config(config.model_config)
    assert config.model_config.model_arch_config == SimpleNamespace(
        is_deepseek_mla=False, quantization_config=None
    )


def test_on_a_cpu_refusals_come_through_the_hook() -> None:
    with pytest.raises(UserError, match="--tensor-parallel-size is 2"):
        V41ConfigHook.verify_and_update_config(engine_config(tensor_parallel_size=2))
    with pytest.raises(SettingsError, match="unknown key"):
        V41ConfigHook.verify_and_update_config(engine_config(additional_config={"deepinfer": {"x": 1}}))


def test_vllms_class_stays_where_it_has_one(native: list[str]) -> None:
    config = quantised(tensor_parallel_size=8)  # which vLLM's class can do
    V41ConfigHook.verify_and_update_model_config(config.model_config)
    V41ConfigHook.verify_and_update_config(config)
    assert native == ["verify_and_update_model_config", "verify_and_update_config"]
    assert config.model_config.hf_config.architectures == [NATIVE_NAME]
    assert config.model_config.model_arch_config.is_deepseek_mla
    assert config.model_config.hf_config.quantization_config == {"quant_method": "fp8"}


def test_unless_additional_config_asks_for_ours(native: list[str]) -> None:
    config = quantised(quantization="fp8", additional_config={"deepinfer": {"portable_model": True}})
    V41ConfigHook.verify_and_update_config(config)
    assert native == []
    assert config.model_config.hf_config.architectures == [PORTABLE_NAME]
    assert config.model_config.quantization is None
    assert not config.model_config.model_arch_config.is_deepseek_mla
    assert not hasattr(config.model_config.hf_config, "quantization_config")


def test_or_the_checkpoint_names_ours(native: list[str]) -> None:
    config = quantised()
    config.model_config.hf_config.architectures = [PORTABLE_NAME]
    V41ConfigHook.verify_and_update_model_config(config.model_config)
    V41ConfigHook.verify_and_update_config(config)
    assert native == []
    assert not config.model_config.model_arch_config.is_deepseek_mla


@pytest.mark.parametrize("name", ["encoder_replay", "decoder_replay"])
@pytest.mark.parametrize("value", [True, False])
def test_where_vllms_flags_rule_ours_are_refused(native: list[str], name: str, value: bool) -> None:
    config = quantised(additional_config={"deepinfer": {name: value}})
    with pytest.raises(UserError, match=f"{name}.* leave it out, vLLM's own follows --swa-bounded-replay"):
        V41ConfigHook.verify_and_update_config(config)
    assert native == []


def test_settings_are_read_on_every_machine(native: list[str]) -> None:
    with pytest.raises(SettingsError, match="unknown key"):
        V41ConfigHook.verify_and_update_config(engine_config(additional_config={"deepinfer": {"x": 1}}))
    assert native == []


@pytest.mark.parametrize(("cuda", "rocm", "wanted"), [(1, 0, True), (0, 1, True), (0, 0, False)])
def test_where_vllm_has_a_class(monkeypatch: pytest.MonkeyPatch, cuda: int, rocm: int, wanted: bool) -> None:
    platform = SimpleNamespace(is_cuda=lambda: cuda, is_rocm=lambda: rocm)
    monkeypatch.setattr(config_hook, "current_platform", platform)
    assert config_hook.native_class_exists() is wanted
