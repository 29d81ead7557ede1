"""The noise-free bound: what must hold of it whatever the coefficients."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import pytest

from vllm_deepinfer.bench.scheduler.bound import Prompt, budgeted, fixed, simulate
from vllm_deepinfer.bench.scheduler.frontier import at
from vllm_deepinfer.bench.scheduler.settings import Fixed, full_grid, quick_grid
from vllm_deepinfer.bench.scheduler.traffic import LONG, MIXED
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, Features, StepCost

LINEAR = StepCost(0.0, 1e-5, tile=32)


def test_fixed_is_vllm_s_cut() -> None:
    prompts = [Prompt(0.0, 1_000, 900), Prompt(0.0, 5_000), Prompt(0.0, 5_000)]
    assert fixed(Fixed(512), 4)(prompts, Features(), 0.0) == {0: 100, 1: 408}
    assert fixed(Fixed(512, 256), 4)(prompts, Features(), 0.0) == {0: 100, 1: 256, 2: 152}
    assert fixed(Fixed(4), 4)(prompts, Features(), 0.0) == {}


def test_budgeted_serves_the_shortest_and_keeps_its_limit() -> None:
    prompts = [Prompt(0.0, 9_000), Prompt(1.0, 200)]
    decodes = Features(decodes=4, decode_context=2_000)
    given = budgeted(TWO_CORE_DENSE, 0.04)(prompts, decodes, 0.0)
    assert given[1] == 200 and (4 + 200 + given[0]) % 32 == 0


def test_without_costs_per_step_cutting_differently_gains_nothing() -> None:
    """The issue's own check: with a = d = e = g = 0 the ratio is 1."""
    ours = simulate(LINEAR, LONG.lengths(0), 0, budgeted(LINEAR, 512 * 1e-5))
    stock = simulate(LINEAR, LONG.lengths(0), 0, fixed(Fixed(512), 0))
    assert ours.throughput == pytest.approx(stock.throughput, rel=1e-3)
    assert ours.p99 == pytest.approx(stock.p99, rel=1e-6)


@pytest.mark.parametrize("decodes", [1, 4, 16])
@pytest.mark.parametrize("mix", [MIXED, LONG], ids=lambda m: m.name)
def test_at_equal_p99_the_bound_is_at_least_one_on_growing_contexts(mix: object, decodes: int) -> None:
    assert isinstance(mix, type(MIXED))
    grid = [s for s in full_grid() if not s.threshold]
    stock = [simulate(TWO_CORE_DENSE, mix.lengths(0), decodes, fixed(s, decodes), 600) for s in grid]
    ours = simulate(TWO_CORE_DENSE, mix.lengths(0), decodes, budgeted(TWO_CORE_DENSE, 0.12), 600)
    best = at([(s.p99, s.throughput) for s in stock], ours.p99)
    assert ours.p99 <= 0.12
    assert best is not None and ours.throughput / best > 1.0


def test_more_to_save_per_step_is_more_to_gain() -> None:
    costly = replace(TWO_CORE_DENSE, per_step=4 * TWO_CORE_DENSE.per_step)
    gains = []
    for cost in (TWO_CORE_DENSE, costly):
        stock = simulate(cost, LONG.lengths(0), 4, fixed(Fixed(128), 4), 600)
        ours = simulate(cost, LONG.lengths(0), 4, budgeted(cost, stock.p99), 600)
        gains.append(ours.throughput / stock.throughput)
    assert 1.0 < gains[0] < gains[1]


def test_every_token_is_computed_once() -> None:
    """Prompts of one length: throughput times time is a whole number of prompts, but for those under way."""
    found = simulate(TWO_CORE_DENSE, repeat(1_000), 4, budgeted(TWO_CORE_DENSE, 0.05), 400)
    assert found.throughput > 0 and found.p99 <= 0.05


def test_grids() -> None:
    assert {s.chunk for s in full_grid()} == {128, 256, 512, 1024, 2048, 8192}
    assert all(s.threshold < s.chunk for s in full_grid())
    assert set(quick_grid()) <= set(full_grid())
    assert (Fixed(512).label, Fixed(2048, 512).label) == ("512", "2048/512")
