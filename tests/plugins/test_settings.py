"""What a user may write under `deepinfer`, and the one sentence about what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_deepinfer_plugins.settings import Settings, SettingsError


def refusal(part: Any) -> str:
    with pytest.raises(SettingsError) as error:
        Settings.read({"deepinfer": part})
    message = str(error.value)
    assert "\n" not in message and ". " not in message
    return message


@pytest.mark.parametrize("config", [None, {}, {"deepinfer": {}}, {"another_plugin": {"x": 1}}, "text"])
def test_nothing_said(config: Any) -> None:
    settings = Settings.read(config)
    assert (settings.portable_model, settings.batch_invariant) == (False, None)


def test_everything_said() -> None:
    settings = Settings.read({"deepinfer": {"portable_model": True, "batch_invariant": False}, "other": 3})
    assert (settings.portable_model, settings.batch_invariant) == (True, False)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("batch_invariance", "batch_invariant"),
        ("portablemodel", "portable_model"),
        ("Batch_Invariant", "batch_invariant"),
        ("batch-invariant", "batch_invariant"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    message = refusal({key: True})
    assert message == f'additional_config["deepinfer"] has the unknown key {key}: did you mean {near}?'


def test_an_unknown_key_like_no_other_lists_them() -> None:
    message = refusal({"zzz": 1})
    assert message.startswith('additional_config["deepinfer"] has the unknown key zzz: the keys are ')
    assert message.endswith(", ".join(Settings.model_fields))


@pytest.mark.parametrize("key", ["portable_model", "batch_invariant"])
@pytest.mark.parametrize("value", ["true", 1, 0, [True], {"on": True}])
def test_a_value_of_the_wrong_type(key: str, value: Any) -> None:
    message = refusal({key: value})
    assert message.startswith(f'additional_config["deepinfer"]["{key}"] is {value!r}: ')
    assert "boolean" in message


@pytest.mark.parametrize("part", ["on", True, 3, ["portable_model"], None])
def test_no_object(part: Any) -> None:
    assert refusal(part) == f'additional_config["deepinfer"] is {part!r}: write an object such as {{}}'


@pytest.mark.parametrize(
    ("setting", "variable", "wanted"),
    [
        (None, None, False),
        (None, "", False),
        (None, "0", False),
        (None, "1", True),
        (False, "1", False),
        (True, None, True),
        (True, "0", True),
    ],
)
def test_the_setting_goes_before_vllms_variable(
    monkeypatch: pytest.MonkeyPatch, setting: bool | None, variable: str | None, wanted: bool
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    assert Settings(batch_invariant=setting).invariant is wanted


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().portable_model = True  # type: ignore[misc]


@pytest.mark.parametrize("key", ["itl_target_ms", "step_budget_ms"])
@pytest.mark.parametrize("value", [0, -1, -0.5, "40", True, [40], float("nan"), float("inf")])
def test_a_target_that_is_no_positive_number(key: str, value: Any) -> None:
    assert refusal({key: value}).startswith(f'additional_config["deepinfer"]["{key}"] is {value!r}: ')


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("itl_percentile", 0),
        ("itl_percentile", 100),
        ("prefill_tile", 0),
        ("prefill_tile", 32.0),
        ("prefill_tile", True),
        ("prefill_order", "random"),
        ("step_cost_file", ""),
        ("step_cost_file", 3),
    ],
)
def test_scheduler_keys_that_cannot_be_acted_on(key: str, value: Any) -> None:
    assert refusal({key: value}).startswith(f'additional_config["deepinfer"]["{key}"] is {value!r}: ')


def test_the_scheduler_s_settings() -> None:
    said = {"itl_target_ms": 40, "itl_percentile": 95, "prefill_order": "fcfs", "prefill_tile": 64}
    settings = Settings.read({"deepinfer": {**said, "step_cost_file": "/tmp/fit.json"}})
    assert (settings.itl_target_ms, settings.itl_percentile, settings.prefill_tile) == (40.0, 95.0, 64)
    assert (settings.prefill_order, settings.step_cost_file) == ("fcfs", "/tmp/fit.json")
    assert Settings().itl_target_ms is None and Settings().prefill_order == "shortest"


@pytest.mark.parametrize("key", ["deepinfr", "DeepInfer", "deep_infer", "deepinfer_"])
def test_a_slip_in_our_own_name(key: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown key {key}: did you mean"):
        Settings.read({key: {"batch_invariant": True}})


def test_a_setting_one_level_too_high() -> None:
    with pytest.raises(SettingsError, match='has batch_invariant outside "deepinfer"'):
        Settings.read({"batch_invariant": True})
