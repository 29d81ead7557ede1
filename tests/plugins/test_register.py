"""The general plugin: what it registers, where, and that it may run more than once."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins import register as plugin


class Registry:
    def __init__(self) -> None:
        self.models: list[tuple[str, str]] = []

    def register_model(self, name: str, model: str) -> None:
        self.models.append((name, model))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's registries as stand-ins, the platform a CPU with AMX, and every other installation left out."""
    import torch
    import vllm.model_executor.models as models
    import vllm.platforms as platforms
    from vllm.model_executor.models import config
    from vllm_deepinfer_plugins import cli_errors, expansion, ranks, seeds, tokenizer
    from vllm_deepinfer_plugins.model import config_hook
    from vllm_deepinfer_plugins.verification import upstream

    world = SimpleNamespace(registry=Registry(), hooks={}, calls=[], cpu=True, cuda=False, amx=True)
    platform = SimpleNamespace(
        is_cpu=lambda: world.cpu, is_cuda=lambda: world.cuda, is_rocm=lambda: False, device_type="cpu"
    )
    monkeypatch.setattr(models, "ModelRegistry", world.registry)
    monkeypatch.setattr(config, "MODELS_CONFIG_MAP", world.hooks)
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(config_hook, "current_platform", platform)
    monkeypatch.setattr(cli_errors, "install", lambda: world.calls.append("cli_errors"))
    monkeypatch.setattr(seeds, "install", lambda: world.calls.append("seeds"))
    monkeypatch.setattr(expansion, "install", lambda: world.calls.append("expansion"))
    monkeypatch.setattr(ranks, "install", lambda: world.calls.append("ranks"))
    monkeypatch.setattr(upstream, "install", lambda: world.calls.append("upstream"))
    monkeypatch.setattr(tokenizer, "register_tokenizer", lambda: world.calls.append("tokenizer"))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: world.amx)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: world.calls.append("amx"))
    return world


def test_on_a_cpu_both_names_are_ours(world: SimpleNamespace) -> None:
    plugin.register()
    assert world.registry.models == [
        ("DeepInferV41ForCausalLM", plugin.MODEL),
        ("DeepseekV41ForCausalLM", plugin.MODEL),
    ]
    assert set(world.hooks) == {"DeepInferV41ForCausalLM", "DeepseekV41ForCausalLM"}
    assert {hook.__name__ for hook in world.hooks.values()} == {"V41ConfigHook"}


def test_where_vllm_has_a_class_its_name_stays_its_own(world: SimpleNamespace) -> None:
    world.cpu, world.cuda = False, True
    plugin.register()
    assert world.registry.models == [("DeepInferV41ForCausalLM", plugin.MODEL)]
    assert set(world.hooks) == {"DeepInferV41ForCausalLM", "DeepseekV41ForCausalLM"}, "refusals need the hook"
    assert "upstream" in world.calls and "seeds" not in world.calls


def test_a_vllm_without_that_verification_keeps_its_own(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.cpu, world.cuda = False, True
    monkeypatch.setitem(sys.modules, "vllm_deepinfer_plugins.verification.upstream", None)
    monkeypatch.delattr(importlib.import_module("vllm_deepinfer_plugins.verification"), "upstream")
    plugin.register()
    assert "keeps its own costs" in caplog.text
    assert world.registry.models == [("DeepInferV41ForCausalLM", plugin.MODEL)]


@pytest.mark.parametrize(("cpu", "amx", "asked"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_tile_permission_is_asked_for_on_a_cpu_with_amx(
    world: SimpleNamespace, cpu: bool, amx: bool, asked: int
) -> None:
    world.cpu, world.amx = cpu, amx
    plugin.register()
    assert world.calls.count("amx") == asked
    for cure in ("ranks", "seeds", "expansion"):
        assert world.calls.count(cure) == cpu


def test_twice_is_once(world: SimpleNamespace) -> None:
    plugin.register()
    first, hooks = set(world.registry.models), dict(world.hooks)
    plugin.register()
    assert set(world.registry.models) == first and world.hooks == hooks


def test_the_class_is_where_the_registry_says() -> None:
    module, name = plugin.MODEL.split(":")
    assert getattr(importlib.import_module(module), name).__name__ == "DeepseekV41ForCausalLM"


def test_vllm_finds_the_plugin() -> None:
    (found,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "deepinfer")
    loaded: Any = found.load()
    assert loaded is plugin.register


@pytest.mark.slow
def test_vllms_own_registry_resolves_the_model() -> None:
    script = """
from vllm.plugins import load_general_plugins
load_general_plugins(); load_general_plugins()
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
for name in ("DeepseekV41ForCausalLM", "DeepInferV41ForCausalLM"):
    print(name, ModelRegistry.models[name].load_model_cls().__module__, MODELS_CONFIG_MAP[name].__name__)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = [
        line.split() for line in result.stdout.splitlines() if line.startswith(("DeepseekV41", "DeepInfer"))
    ]
    module = "vllm_deepinfer_plugins.model.causal_lm"
    assert lines == [
        [name, module, "V41ConfigHook"] for name in ("DeepseekV41ForCausalLM", "DeepInferV41ForCausalLM")
    ]
