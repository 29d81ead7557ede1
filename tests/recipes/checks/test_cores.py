"""Cores and environment of replicas."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recipes.samples import ALONE, SPLIT, cluster, faults
from vllm_deepinfer.recipes.checks import cores
from vllm_deepinfer.recipes.checks.cores import check_cores, cores_of
from vllm_deepinfer.recipes.cluster_view import NodeView

HERE = cluster(NodeView("here", 4, local=True))


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: frozenset(range(4)))


def told(base: dict[str, Any] = SPLIT, **changes: Any) -> list[str]:
    return faults(base, check=check_cores, cluster=HERE, **changes)


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("0", {0}),
        ("0-3", {0, 1, 2, 3}),
        ("0-1,8", {0, 1, 8}),
        ("3-1", set()),
        ("auto", None),
        ("", None),
        ("0|1", None),  # the ranks of one engine, which a replica on a CPU has not
        ("0-99999999", None),
    ],
)
def test_cores_of_a_bind(bind: str, expected: set[int] | None) -> None:
    assert cores_of(bind) == expected


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_list_of_cores_is_read_back(wanted: set[int]) -> None:
    assert cores_of(",".join(map(str, wanted))) == frozenset(wanted)


def test_distinct_cores_pass() -> None:
    assert told(pools__prefill__cpu_binds=["0"], pools__decode__cpu_binds=["1,2-3"]) == []


def test_a_core_twice_and_a_core_that_is_not_there() -> None:
    assert told(pools__prefill__cpu_binds=["0-1"], pools__decode__cpu_binds=["1,7"]) == [
        "pools.decode.cpu_binds[0] has core 1, which pools.prefill.cpu_binds[0] has too: give each "
        "replica its "
        "own cores.",
        "pools.decode.cpu_binds[0] has core 7, which this machine does not give this process: its cores "
        "are 0, "
        "1, 2, 3.",
    ]


def test_other_machines_have_cores_of_their_own() -> None:
    far = cluster(NodeView("a", 4), NodeView("b", 4))
    changes: dict[str, Any] = {"pools__prefill__cpu_binds": ["0-9"], "pools__decode__cpu_binds": ["0-9"]}
    assert faults(SPLIT, check=check_cores, cluster=far, **changes) == []
    assert faults(SPLIT, check=check_cores, **changes) == []


def test_what_is_no_bind() -> None:
    assert told(pools__prefill__cpu_binds=["all"]) == [
        'pools.prefill.cpu_binds[0] is "all": write cores such as "0-3" or "0,2".'
    ]
    assert told(ALONE, pools__all__cpu_binds=["0"], pools__all__resources={"gpus": 1}) == [
        "pools.all.cpu_binds is for engines on CPUs, and this pool has GPUs: leave it out."
    ]


def test_a_bind_for_each_replica_of_one_machine() -> None:
    assert told(ALONE, pools__all__cpu_binds=["0"], pools__all__replicas={"min": 1, "max": 3}) == [
        "pools.all.cpu_binds has 1 entries for up to 3 replicas on one machine: write one for each."
    ]
    changes: dict[str, Any] = {
        "pools__all__replicas": 3,
        "pools__all__placement": {"max_replicas_per_node": 1},
    }
    assert told(ALONE, pools__all__cpu_binds=["0"], **changes) == []


def test_environment() -> None:
    env = {
        "OMP_NUM_THREADS": "1",
        "A B": "x",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5",
    }
    assert told(ALONE, pools__all__env=env) == [
        "pools.all.env has 'A B': a variable's name has letters, digits and underscores.",
        "pools.all.env.VLLM_CPU_KVCACHE_SPACE is set by the application: write kv_gib instead.",
        "pools.all.env.VLLM_NIXL_SIDE_CHANNEL_PORT is set by the application: write "
        "transfer.nixl.side_channel_base_port instead.",
    ]
