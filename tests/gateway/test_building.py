"""From a checkpoint folder to an app."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from deepseek_recipe import ModelVersion

from tests.gateway.harness import DATA, EOS
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway.building import build_app, model_version
from vllm_deepinfer.gateway.settings import GatewaySettings

SETTINGS = GatewaySettings(served_names=("m",), max_active=3, thinking=False)


def engine() -> SimulatedEngine:
    return SimulatedEngine(SimulatedConfig(vocab_size=512, eos_token_id=EOS, max_model_len=77))


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        ("deepseek_v4", ModelVersion.DeepseekV4Pro),
        ("deepseek_v41", ModelVersion.DeepseekV41Flash),
        ("deepseek_v4_1", ModelVersion.DeepseekV41Flash),
    ],
)
def test_the_dialect_follows_the_exact_model_type(tmp_path: Path, kind: str, version: ModelVersion) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert model_version(tmp_path) == version


def test_without_a_config_it_is_the_newest() -> None:
    assert model_version(DATA) == ModelVersion.DeepseekV41Flash


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model_type": "llama"}', '{"model_type": "deepseek_v411"}']
)
def test_another_family_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        model_version(tmp_path)


def test_an_app() -> None:
    app = build_app(engine(), DATA, SETTINGS)
    card = app.core.card
    assert (tuple(card.names), card.max_model_len, card.thinking) == (("m",), 77, False)
    assert card.version == ModelVersion.DeepseekV41Flash
    app.core.runner.prompts.close()


def test_a_tokenizer_without_control_tokens_is_refused(tmp_path: Path) -> None:
    shutil.copy(DATA / "tokenizer.json", tmp_path)
    file = tmp_path / "tokenizer.json"
    parsed = json.loads(file.read_text())
    parsed["added_tokens"] = [t for t in parsed["added_tokens"] if t["content"] != "｜DSML｜"]
    file.write_text(json.dumps(parsed))
    with pytest.raises(UserError, match="DSML"):
        build_app(engine(), tmp_path, SETTINGS)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        build_app(engine(), tmp_path, SETTINGS)
