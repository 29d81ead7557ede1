from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from vllm_deepinfer_plugins.train import compiled


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    compiled.enable(False)


def test_off_it_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("nothing is to be compiled"))
    double = compiled.compiled(lambda x: x * 2)
    assert compiled.enable(False) is False and double(torch.ones(2)).tolist() == [2, 2]


def test_without_a_compiler_it_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compiled.enable(True) is False


def test_on_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, bool]] = []

    def fake(function, **options: bool):  # type: ignore[no-untyped-def]
        calls.append(options)
        return lambda x: function(x) + 1

    monkeypatch.setattr(torch, "compile", fake)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    double = compiled.compiled(lambda x: x * 2)
    assert compiled.enable(True) is True
    assert double(torch.ones(1)).item() == double(torch.ones(1)).item() == 3
    assert calls == [{"dynamic": False, "fullgraph": True}]
