"""A worker's side against a NIXL that does as it is told: reads are checked, overdue ones given up."""

from __future__ import annotations

import ctypes
import queue
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

worker_module = pytest.importorskip("vllm_deepinfer_plugins.hand_over.worker")
messages = pytest.importorskip("vllm_deepinfer_plugins.hand_over.messages")
pledges = pytest.importorskip("vllm_deepinfer_plugins.hand_over.pledges")
metadata = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")


class Nixl:
    """Transfers by handle: words are copied when they are looked at, KV is as its state says."""

    def __init__(self) -> None:
        self.states: dict[Any, str] = {}
        self.unreleasable: set[Any] = set()
        self.released: list[Any] = []
        self.words: dict[Any, tuple[int, int]] = {}
        self.stalls = False

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], kind: str) -> Any:
        assert kind == "DRAM" and descs[0][1] == 8
        return descs[0][0]

    def initialize_xfer(self, what: str, here: int, there: int, agent: str) -> Any:
        assert what == "READ" and agent == "peer"
        handle = f"word{len(self.words)}"
        self.words[handle] = (here, there)
        return handle

    def transfer(self, handle: Any) -> None:
        self.states[handle] = "PROC" if self.stalls else "DONE"
        if not self.stalls:
            here, there = self.words[handle]
            ctypes.memmove(here, there, 8)

    def check_xfer_state(self, handle: Any) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: Any) -> None:
        return None

    def release_xfer_handle(self, handle: Any) -> None:
        if handle in self.unreleasable:
            raise RuntimeError("still writing")
        self.released.append(handle)


class Worker(worker_module.HandOverWorker):  # type: ignore[misc, name-defined]
    """What the tested methods use, and nothing of an engine."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.nixl_wrapper = Nixl()
        self.xfer_stats = messages.HandOverStats()
        self._fetch_timeout_s = timeout_s
        self._board = pledges.PledgeBoard()
        self._landing = np.zeros(8, dtype=np.uint64)
        self._free_landings = list(range(8))
        self._expected: Any = {}
        self._checks: Any = {}
        self._since: Any = {}
        self._stuck: Any = set()
        self._released: Any = set()
        self._recving_metadata: Any = {}
        self._recving_transfers: Any = {}
        self._recv_failures: Any = set()
        self._failed_remote_engines: Any = set()
        self._failed_recv_reqs: Any = queue.Queue()
        self._reqs_to_send: Any = {}
        self._reqs_to_process: Any = set()
        self.consumer_notification_counts_by_req: Any = defaultdict(int)
        self.expected_consumer_notifications_by_req: Any = {}
        self.tp_mappings = {"p": SimpleNamespace(all_source_ranks=[0])}
        self._remote_agents = {"p": {(0, 0): "peer"}}
        self.failures: list[str] = []

    def _log_failure(self, *, failure_type: str, **_: Any) -> None:
        self.failures.append(failure_type)

    def fetch(self, request_id: str, number: int, board: Any, state: str = "DONE") -> None:
        """As after `start_load_kv`: a read is under way."""
        self._recving_metadata[request_id] = SimpleNamespace(remote=SimpleNamespace(engine_id="p"))
        self._recving_transfers[request_id] = [f"kv {request_id}"]
        self.nixl_wrapper.states[f"kv {request_id}"] = state
        self._expected[request_id] = messages.Pledge(number, {"0:0": board.address})

    def pop(self) -> tuple[set[str], set[str]]:
        done, failed = self._pop_done_transfers(self._recving_transfers)
        return done, failed


@pytest.fixture
def peer() -> Any:
    board = pledges.PledgeBoard()
    board.give("r", 41)
    return board


def test_a_read_of_what_was_held_counts(peer: Any) -> None:
    worker = Worker()
    worker.fetch("a", 41, peer)
    assert worker.pop() == ({"a"}, set())
    assert sorted(worker._free_landings) == list(range(8)) and not worker._checks
    assert worker.nixl_wrapper.released == ["kv a", "word0"]


def test_a_read_of_what_was_given_up_fails(peer: Any) -> None:
    worker = Worker()
    worker.fetch("a", 41, peer)
    peer.revoke("r")
    assert worker.pop() == ({"a"}, {"a"})
    assert len(worker.xfer_stats.data["num_failed_transfers"]) == 1


def test_a_read_that_its_peer_has_already_heard_of_counts(peer: Any) -> None:
    worker = Worker()
    worker.fetch("a", 41, peer)
    peer.fulfil("r")
    assert worker.pop() == ({"a"}, set())


def test_the_word_is_not_looked_at_before_the_kv_has_come(peer: Any) -> None:
    worker = Worker()
    worker.fetch("a", 41, peer, state="PROC")
    assert worker.pop() == (set(), set()) and not worker.nixl_wrapper.words
    peer.revoke("r")
    worker.nixl_wrapper.states["kv a"] = "DONE"
    assert worker.pop() == ({"a"}, {"a"})


def test_a_word_that_takes_its_time_is_waited_for_over_steps(peer: Any) -> None:
    worker = Worker()
    worker.nixl_wrapper.stalls = True
    worker.fetch("a", 41, peer)
    assert worker.pop() == (set(), set()) and "a" in worker._checks
    here, there = worker.nixl_wrapper.words["word0"]
    ctypes.memmove(here, there, 8)
    worker.nixl_wrapper.states["word0"] = "DONE"
    assert worker.pop() == ({"a"}, set())


def test_a_word_that_cannot_be_read_fails_the_fetch(peer: Any) -> None:
    worker = Worker()
    worker._remote_agents = {"p": {}}  # its process is gone
    worker.fetch("a", 41, peer)
    done, failed = worker.pop()
    assert failed == {"a"} and "a" not in done and worker.failures == ["pledge_unreadable"]
    worker = Worker()
    worker.nixl_wrapper.stalls = True
    worker.fetch("b", 41, peer)
    worker.pop()
    worker.nixl_wrapper.states["word0"] = "ERR"
    assert worker.pop() == ({"b"}, {"b"})


def test_a_read_that_failed_is_not_checked(peer: Any) -> None:
    worker = Worker()
    worker.fetch("a", 41, peer, state="ERR")
    assert worker.pop() == ({"a"}, {"a"}) and not worker.nixl_wrapper.words


def test_an_overdue_read_is_stopped(peer: Any) -> None:
    worker = Worker(timeout_s=0.0)
    worker.fetch("a", 41, peer, state="PROC")
    worker._give_up_overdue()
    assert "a" not in worker._recving_transfers and worker._recv_failures == {"a"}
    assert worker.nixl_wrapper.released == ["kv a"] and not worker.xfer_stats.data[messages.STUCK]


def test_one_that_cannot_be_stopped_keeps_its_blocks_and_is_told_once(peer: Any) -> None:
    worker = Worker(timeout_s=0.0)
    worker.nixl_wrapper.unreleasable = {"kv a"}
    worker.fetch("a", 41, peer, state="PROC")
    for _ in range(3):
        worker._give_up_overdue()
    assert worker._recving_transfers == {"a": ["kv a"]}, "its blocks are not free"
    assert worker.xfer_stats.data[messages.STUCK] == ["a"]


def test_one_whose_peer_never_answered_is_told() -> None:
    worker = Worker(timeout_s=0.0)
    worker._recving_metadata["a"] = SimpleNamespace(remote=SimpleNamespace(engine_id="p"))
    worker._give_up_overdue()
    assert worker.xfer_stats.data[messages.STUCK] == ["a"] and not worker._recv_failures


def test_nothing_is_overdue_before_its_time(peer: Any) -> None:
    worker = Worker(timeout_s=1000.0)
    worker.fetch("a", 41, peer, state="PROC")
    worker._give_up_overdue()
    assert worker._recving_transfers == {"a": ["kv a"]} and not worker._recv_failures


def step(**values: Any) -> Any:
    made = messages.HandOverMetadata(metadata.NixlConnectorMetadata())
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_pledges_are_posted_and_revoked_with_the_step_s_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module.NixlPullConnectorWorker, "start_load_kv", lambda self, metadata: None)
    worker = Worker()
    worker.start_load_kv(step(pledges={"a": 5, "b": 6, "c": 7}))
    assert [int(worker._board.words[one]) for one in (5, 6, 7)] == [5, 6, 7]
    worker.start_load_kv(step(reqs_not_processed={"a"}))  # aborted before it ended
    worker._reqs_to_send = {"b": 1e9, "c": 1e9}
    worker._reqs_to_process = {"b", "c"}
    worker.start_load_kv(step(released={"b", "unknown"}))
    assert [int(worker._board.words[one]) for one in (5, 6, 7)] == [0, 0, 7]
    assert worker._released == {"b"} and worker._reqs_to_send == {"c": 1e9}


def test_a_lease_that_ends_revokes() -> None:
    worker = Worker()
    worker._board.give("a", 5)
    worker._reqs_to_send, worker._reqs_to_process = {"a": 0.0}, {"a"}
    done: set[str] = set()
    worker._reap_expired_send_leases(done)
    assert done == {"a"} and worker._board.words[5] == 0


def test_stores_of_several_sizes_in_one_block_are_whole_blocks() -> None:
    backing = torch.zeros(4, 64, dtype=torch.uint8)
    small = backing[:, :16].view(torch.float32)
    large = backing.view(torch.bfloat16)
    whole = worker_module.whole_blocks({"small": small, "large": large})
    assert {tuple(one.shape) for one in whole.values()} == {(4, 64)}
    assert whole["small"].data_ptr() == backing.data_ptr() and whole["small"].dtype is torch.uint8


def test_caches_of_their_own_stay_as_they_are() -> None:
    caches = {name: torch.zeros(4, 2, 8) for name in "ab"}
    assert worker_module.whole_blocks(caches) is caches
    one = {"a": torch.zeros(4, 8)}
    assert worker_module.whole_blocks(one) is one
