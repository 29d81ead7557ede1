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
    assert refusal({"zzz": 1}) == (
        'additional_config["deepinfer"] has the unknown key zzz: the keys are portable_model, batch_invariant'
    )


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
