"""Loading, and the switch: when the kernels take over from PyTorch and when they do not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.kernels import Kernels, active, library, load, suspended
from vllm_deepinfer_plugins.kernels.build import BuildError
from vllm_deepinfer_plugins.model.cached import cached_row
from vllm_deepinfer_plugins.model.layers import RMSNorm
from vllm_deepinfer_plugins.model.mhc import HyperConnection, enter, expand
from vllm_deepinfer_plugins.model.moe import Router
from vllm_deepinfer_plugins.model.rope import rotate

from .samples import noise
from .variants import VARIANTS, compiled


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The switch in its on position."""
    made = compiled(next(iter(VARIANTS)))
    monkeypatch.setattr(library, "_loaded", made)
    return made


def test_the_switch_is_off_until_somebody_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert active(noise(2, 32)) is None
    made, calls = compiled(next(iter(VARIANTS))), []
    monkeypatch.setattr(library, "build", lambda: calls.append(1))
    monkeypatch.setattr(library, "Kernels", lambda path: made)
    assert load() is made and load() is made and len(calls) == 1
    assert active(noise(2, 32)) is made


def test_a_build_that_fails_leaves_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise BuildError("no")

    monkeypatch.setattr(library, "build", refuse)
    with pytest.raises(BuildError):
        load()
    assert active(noise(2, 32)) is None


def test_who_is_taken(on: Kernels) -> None:
    assert active(noise(2, 32)) is on
    for dtype in (torch.float32, torch.float16, torch.float64, torch.int16):
        assert active(torch.zeros(2, 32, dtype=dtype)) is None
    assert active(torch.zeros(2, 32, dtype=torch.bfloat16, device="meta")) is None
    with torch.enable_grad():
        assert active(noise(2, 32)) is None
    with torch.inference_mode():
        assert active(noise(2, 32)) is on


def test_suspended_and_back_again(on: Kernels) -> None:
    with suspended():
        assert active(noise(2, 32)) is None
        with suspended():
            pass
        assert active(noise(2, 32)) is None
    assert active(noise(2, 32)) is on
    with pytest.raises(ZeroDivisionError), suspended():
        raise ZeroDivisionError
    assert active(noise(2, 32)) is on


def test_every_function_has_its_signature(on: Kernels) -> None:
    for name, letters in library._SIGNATURES.items():
        function = getattr(on.functions, name)
        assert len(function.argtypes) == len(letters) and function.restype is ctypes.c_int


def test_what_is_no_library_is_an_oserror(tmp_path: Path) -> None:
    """The model then runs without, and says so."""
    for content in (b"", b"no library", bytes(4096)):
        (tmp_path / "kernels.so").write_bytes(content)
        with pytest.raises(OSError, match=r"kernels\.so"):
            Kernels(tmp_path / "kernels.so")
    with pytest.raises(OSError, match="nowhere"):
        Kernels(tmp_path / "nowhere.so")


def test_no_grant_of_tile_registers_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = SimpleNamespace(deepinfer_prepare=lambda: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: refusing)
    with pytest.raises(OSError, match="tile registers"):
        Kernels(Path("any.so"))


def test_memory_that_runs_out_is_a_memory_error() -> None:
    Kernels.checked(0)
    with pytest.raises(MemoryError, match="lower max_num_batched_tokens"):
        Kernels.checked(1)


def mixing() -> HyperConnection:
    config: Any = SimpleNamespace(
        hc_mult=4,
        hidden_size=32,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-20,
        initializer_range=0.1,
    )
    return HyperConnection(config)


def router() -> Router:
    config: Any = SimpleNamespace(routed_scaling_factor=1.5, norm_topk_prob=True, hidden_size=32)
    return Router(config, 16, 4)


def angles() -> torch.Tensor:
    turns = noise(5, 8, dtype=torch.float32)
    return torch.polar(torch.ones_like(turns), turns)


def weighted(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-20, torch.bfloat16)
    norm.weight.data = noise(size, seed=4)
    return norm


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "norm": lambda: weighted(64)(noise(5, 64)),
    "rotate": lambda: rotate(noise(5, 3, 32), angles()),
    "rotate back in place": lambda: rotate(noise(5, 3, 32), angles(), inverse=True, in_place=True),
    "cached row": lambda: cached_row(noise(5, 64), angles(), "fp8", weighted(64)),
    "enter": lambda: enter(
        _seeded(mixing()), weighted(32), noise(5, 4, 32), noise(5, 4, dtype=torch.float32, seed=1)
    ),
    "expand": lambda: expand(
        noise(5, 32), noise(5, 4, 32, seed=1), noise(5, 4, seed=2).float(), noise(5, 4, 4, seed=3).float()
    ),
    "route": lambda: _seeded(router())(noise(5, 32), None),
}


def _seeded(module: Any) -> Any:
    for at, parameter in enumerate(module.parameters()):
        parameter.data = noise(*parameter.shape, seed=at, dtype=torch.float32) / 8
    return module


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_models_functions_say_the_same_with_and_without(on: Kernels, name: str) -> None:
    found = FUNCTIONS[name]()
    with suspended():
        wanted = FUNCTIONS[name]()
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted, strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["norm", "rotate", "enter", "expand", "route"])
def test_the_models_functions_ask_the_switch(on: Kernels, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With gradients on, no kernel is called."""

    class Trap:
        def __getattr__(self, function: str) -> Any:
            raise AssertionError(f"{function} was called")

    monkeypatch.setattr(library, "_loaded", Trap())
    with torch.enable_grad():
        FUNCTIONS[name]()
    with pytest.raises(AssertionError, match="was called"):
        FUNCTIONS[name]()
