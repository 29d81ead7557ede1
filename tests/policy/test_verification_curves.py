"""The table of a batch's own contexts is what steps of a known machine take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.verification_curves import LEAST, ContextCurve, Profiled, context_slope

MOST = 64


def machine(tokens: int, total_context: float, slope: float) -> float:
    """A jagged step, and a price per token of context."""
    return 5.0 + 0.05 * (8 * -(-tokens // 8)) + slope * total_context


def profile(slope: float, contexts: tuple[int, ...], requests: int) -> list[Profiled]:
    return [
        Profiled(n, min(n, requests), context, machine(n, min(n, requests) * context, slope))
        for n in (1, 8, 32, MOST)
        for context in contexts
    ]


@given(
    slope=st.floats(0, 1e-3),
    total=st.integers(0, 10**6),
    requests=st.integers(1, MOST),
)
def test_the_machine_is_found_again(slope: float, total: int, requests: int) -> None:
    found = context_slope(profile(slope, (512, 8192), requests))
    assert found is not None and found == pytest.approx(slope, rel=1e-6, abs=1e-12)
    tokens = np.arange(MOST + 1)
    has = np.minimum(tokens, requests)
    table = np.array([machine(int(n), float(r) * 8192, slope) for n, r in zip(tokens, has, strict=True)])
    curve = ContextCurve(table, has, 8192, found).at(total)
    expected = [machine(int(n), total, slope) for n in tokens]
    assert np.allclose(curve, expected, rtol=1e-6, atol=1e-6)


def test_a_size_at_one_context_says_nothing() -> None:
    assert context_slope(profile(1e-4, (8192,), 16)) is None
    assert context_slope([]) is None


def test_noise_below_nothing_is_nothing() -> None:
    steps = [Profiled(8, 8, 512, 6.0), Profiled(8, 8, 8192, 5.9)]
    assert context_slope(steps) == 0.0


def test_a_table_never_falls_and_no_step_is_free() -> None:
    table = np.array([1.0, 1.1, 1.2, 1.3])
    curve = ContextCurve(table, np.arange(4, dtype=np.float64), 1000, 0.01).at(0.0)
    assert (np.diff(curve) >= 0).all() and (curve >= LEAST).all()
