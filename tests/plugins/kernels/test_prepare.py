"""What an engine does where kernels cannot be compiled."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from vllm_deepinfer_plugins.kernels import prepare, suspended


def seen(part: str = "native_kernels") -> float:
    return REGISTRY.get_sample_value("deepinfer_fallbacks_total", {"part": part}) or 0.0


@pytest.fixture(autouse=True, params=[True, False], ids=["onednn", "no-onednn"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With oneDNN's bfloat16 products, and as on a CPU that has none."""
    there = bool(request.param)
    monkeypatch.setattr(prepare, "has_onednn_products", lambda: there)
    # Once in a process, and another test may have been the once.
    monkeypatch.setattr(prepare.logger, "warning_once", prepare.logger.warning, raising=False)
    return there


def test_missing_products_are_counted_and_said(onednn: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = seen("onednn_products")
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING):
        prepare.prepare_kernels(wanted=False)
    assert seen("onednn_products") == before + (not onednn)
    assert ("AVX-512" in caplog.text) == (not onednn)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_with_a_compiler_nothing_is_counted() -> None:
    before = seen()
    assert prepare.prepare_kernels(wanted=True)
    with suspended():
        assert prepare.load_or_warn() is not None
    assert seen() == before


def test_not_wanted_is_no_fallback() -> None:
    before = seen()
    assert not prepare.prepare_kernels(wanted=False)
    assert seen() == before


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    before = seen()
    assert not prepare.prepare_kernels(wanted=True)
    assert seen() == before + 1
    logging.getLogger("vllm").propagate = True
    caplog.clear()
    with suspended(), caplog.at_level(logging.WARNING):
        assert prepare.load_or_warn() is None
    (record,) = caplog.records
    assert "no-such-compiler" in record.getMessage() and "slower" in record.getMessage()
