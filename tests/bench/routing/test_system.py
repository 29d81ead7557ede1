"""The recipe of the pools; and every policy once over real Ray processes, each answer compared in full."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")
from vllm_deepinfer.bench.routing.policies import OTHERS, OURS
from vllm_deepinfer.bench.routing.streams import pin
from vllm_deepinfer.bench.routing.system import (
    DECODE_COST,
    POOLS,
    PREFILL_COST,
    cpu_seconds,
    faster,
    find_processes,
    go_first,
    machine_busy,
    make_model,
    recipe_of,
    replay,
    running,
    set_policy,
    simulated_of,
)
from vllm_deepinfer.bench.routing.trace import Arrival
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, StepCost, Work

QUICK = StepCost(per_step=0.005, per_token=1e-5)


def test_twice_the_speed_is_half_the_work_and_the_same_launch() -> None:
    cost = faster(TWO_CORE_DENSE, 2)
    work = [Work(100, prefill_tokens=640), Work(500)]
    launch = TWO_CORE_DENSE.per_step
    assert cost.predict(work) - launch == pytest.approx((TWO_CORE_DENSE.predict(work) - launch) / 2)
    assert replace(cost, per_token=0.0).per_step == launch


def test_the_recipe_has_the_pools_with_their_costs() -> None:
    recipe = recipe_of("x", Path("/model"), POOLS["disaggregated"])
    assert {name: pool.replicas.min for name, pool in recipe.pools.items()} == {"prefill": 5, "decode": 8}
    for name, cost in (("prefill", PREFILL_COST), ("decode", DECODE_COST)):
        simulated = recipe.pools[name].simulated
        assert simulated is not None and simulated.cost is not None
        assert simulated.cost.step_cost() == cost
        assert not simulated.prefix_caching
    assert recipe.served_names == ("bench",)
    assert recipe.name == f"x-{os.getpid()}"


def test_a_replica_holds_the_longest_request_many_times() -> None:
    simulated = simulated_of(QUICK)
    assert simulated.kv_capacity_tokens >= 8 * simulated.max_model_len


def test_the_policy_file_is_whole_at_any_time(tmp_path: Path) -> None:
    for policy in (OURS, *OTHERS):
        set_policy(tmp_path, policy)
        assert (tmp_path / "policy").read_text() == policy
    assert os.listdir(tmp_path) == ["policy"]


def test_this_process_is_found_and_its_time_grows() -> None:
    before, machine = cpu_seconds(os.getpid()), machine_busy()
    sum(range(3_000_000))
    assert cpu_seconds(os.getpid()) > before
    assert machine_busy() >= machine
    assert os.getpid() in find_processes("pytest")
    assert find_processes("no process has this in its command line " * 2) == []


def test_all_threads_of_a_process_are_pinned() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        pin(os.getpid(), min(allowed))
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), allowed)


def test_a_process_goes_first_where_that_is_allowed_and_else_nothing_happens() -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        try:
            before = os.sched_getscheduler(child.pid)
            go_first(child.pid, 1)
            assert os.sched_getscheduler(child.pid) == (os.SCHED_FIFO if os.geteuid() == 0 else before)
        finally:
            child.kill()


@pytest.mark.slow
@pytest.mark.ray
def test_every_policy_answers_every_request_whole_on_the_same_replicas(tmp_path: Path) -> None:
    arrivals = [Arrival(0.05 * number, 100 + 40 * number, 8 + number, number % 3) for number in range(12)]
    recipe = recipe_of("tiny", make_model(tmp_path), {"prefill": (1, QUICK), "decode": (2, QUICK)})
    with running(tmp_path, recipe, lambda line: None) as system:
        assert system.roles == ["prefill", "decode"]
        assert len(system.pids("gateway")) == 1 and len(system.pids("decode")) == 2
        for policy in (OURS, *OTHERS):
            system.follow(policy)
            records = replay(tmp_path, system.ports, arrivals, 20.0)
            for record in records:
                assert (record.fault, record.missing, record.doubled) == ("", 0, 0), policy
                assert record.ended is not None
    assert find_processes(f"ServeReplica:tiny-{os.getpid()}") == []
