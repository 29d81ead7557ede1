"""Contract: what recipes know of vLLM's engine arguments, and of our own settings, is what there is."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm_deepinfer_plugins.settings import Settings

from vllm_deepinfer.recipes.checks.engine_args import DEEPINFER, OWNED, known
from vllm_deepinfer.recipes.checks.pairs import SHARED

FIELDS = {field.name: field.type for field in dataclasses.fields(AsyncEngineArgs) if field.name[0] != "_"}


def test_names_are_vllm_s() -> None:
    """Moved the pin? Write this difference into recipes/data/vllm-0.32-engine-args.json."""
    assert set(known()) == set(FIELDS)


def test_listed_values_are_vllm_s() -> None:
    for name, kind in FIELDS.items():
        expected = known()[name]
        if typing.get_origin(kind) is typing.Literal:
            assert expected == list(typing.get_args(kind)), name


def test_simple_kinds_are_vllm_s() -> None:
    simple: dict[Any, str] = {bool: "bool", int: "int", float: "float", str: "str"}
    for name, kind in FIELDS.items():
        if kind in simple:
            assert known()[name] == simple[kind], name


def test_arguments_with_a_meaning_of_ours_exist() -> None:
    assert set(OWNED) <= set(FIELDS)
    assert set(SHARED) <= set(FIELDS)


def test_settings_are_the_plugin_s() -> None:
    """A new setting? Add it to DEEPINFER in vllm_deepinfer/recipes/checks/engine_args.py."""
    assert set(DEEPINFER) == set(Settings.model_fields)
