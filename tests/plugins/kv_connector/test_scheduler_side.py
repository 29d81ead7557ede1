"""The scheduler's half against fake requests: what is offered, saved, pinned; hangs, aborts, failures."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm_deepinfer_plugins.kv_connector.groups import StoredGroup
from vllm_deepinfer_plugins.kv_connector.metadata import SavesDone
from vllm_deepinfer_plugins.kv_connector.scheduler_side import SchedulerSide
from vllm_deepinfer_plugins.kv_connector.settings import StoreSettings

from tests.store.faulty import Faulty
from vllm_deepinfer.policy.admission import Mode
from vllm_deepinfer.store.codec import Section
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.keys import chain, root
from vllm_deepinfer.store.prefix_store import PrefixStore

RUN, BLOCK = 64, 16
FULL = StoredGroup(0, BLOCK, None, ("a",), (32,))
WINDOW = StoredGroup(1, BLOCK, 17, ("b",), (32,))
PRINT = bytes(32)


class Pool:
    """vLLM's block pool, as far as pins go."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(id=i, ref_cnt=0) for i in range(1_000)]

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    @property
    def pinned(self) -> int:
        return sum(block.ref_cnt for block in self.blocks)


def request(name: str, prompt: int, **more: Any) -> Any:
    ids = list(range(prompt))
    fields: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": ids,
        "all_token_ids": ids,
        "num_tokens": prompt,
        "num_prompt_tokens": prompt,
        "num_computed_tokens": 0,
        "num_in_flight_tokens": 0,
        "cache_salt": None,
        "mm_features": [],
        "lora_request": None,
        "prompt_embeds": None,
        "kv_transfer_params": None,
        "sampling_params": None,
        "skip_reading_prefix_cache": False,
        "status": RequestStatus.RUNNING,
    }
    return SimpleNamespace(**{**fields, **more})


def tables(start: int = 1, tokens: int = 640) -> tuple[list[int], list[int]]:
    count = tokens // BLOCK
    return list(range(start, start + count)), list(range(start + 500, start + 500 + count))


def step(scheduled: dict[str, int], ids: Any = None, preempted: set[str] | None = None) -> Any:
    state = SimpleNamespace(get_block_ids=lambda request_id: ids or tables())
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=preempted,
        kv_connector_block_state=state,
    )


def hang(gate: threading.Event) -> None:
    gate.wait(20)


@pytest.fixture
def backend(tmp_path: Path) -> Faulty:
    return Faulty(DirectoryBackend(tmp_path / "kv", sync=False))


def side(backend: Faulty, groups: tuple[StoredGroup, ...] = (FULL, WINDOW), **settings: Any) -> SchedulerSide:
    made = SchedulerSide(
        StoreSettings(store="/unused", admission=Mode.ALWAYS, **settings),
        PrefixStore(backend),
        groups,
        RUN,
        PRINT,
        shards=1,
        ranks=1,
        num_blocks=400,
        reads=True,
        writes=True,
    )
    made.pool = Pool()
    return made


@pytest.fixture
def scheduler(backend: Faulty) -> Iterator[SchedulerSide]:
    made = side(backend)
    yield made
    made.close()


def fill(backend: Faulty, runs: int, salt: str = "") -> None:
    keys = chain(root(PRINT, salt), range(runs * RUN), RUN)
    from vllm_deepinfer.policy.retention import Choice

    PrefixStore(backend).save([(key, [b"x"]) for key in keys], (Section("full 0", 1),), Choice(1, 1_000))


def settled(scheduler: SchedulerSide, asked: Any, local: int = 0) -> tuple[int | None, bool]:
    """`matched_tokens` once the lookup is answered."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        answer = scheduler.matched_tokens(asked, local)
        if answer[0] is not None:
            return answer
        time.sleep(0.001)
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("prompt", "stored", "local", "expected"),
    [
        (300, 3, 0, 192),
        (300, 9, 0, 256),
        (256, 9, 0, 192),
        (257, 9, 0, 256),
        (300, 3, 80, 112),
        (300, 3, 192, 0),
        (300, 0, 0, 0),
        (63, 0, 0, 0),
        (64, 1, 0, 0),
        (65, 1, 0, 64),
    ],
)
def test_what_is_offered(
    scheduler: SchedulerSide, backend: Faulty, prompt: int, stored: int, local: int, expected: int
) -> None:
    """Whole runs, beyond what the engine has itself, and at least one token is left to compute."""
    fill(backend, stored)
    asked = request("r", prompt)
    scheduler.on_new_request(asked)
    assert settled(scheduler, asked, local) == (expected, expected > 0)


def test_another_tenant_finds_nothing(scheduler: SchedulerSide, backend: Faulty) -> None:
    fill(backend, 4, salt="alice")
    for salt, expected in (("bob", 0), (None, 0), ("alice", 256)):
        asked = request(f"r{salt}", 300, cache_salt=salt)
        scheduler.on_new_request(asked)
        assert settled(scheduler, asked)[0] == expected


def test_a_load_names_runs_blocks_and_where_to_begin(scheduler: SchedulerSide, backend: Faulty) -> None:
    fill(backend, 3)
    asked = request("r", 300)
    scheduler.on_new_request(asked)
    assert settled(scheduler, asked, 80) == (112, True)
    ids = tables()
    ids[1][:10] = [0] * 10  # out of the window
    scheduler.after_alloc(asked, SimpleNamespace(get_block_ids=lambda: ids), 112)
    (load,) = scheduler.build_meta(step({})).loads
    assert (load.request, load.start) == ("r", 80)
    assert [run.shards[0].start for run in load.runs] == [64, 128]
    assert [run.blocks for run in load.runs] == [((5, 6, 7, 8), (0,)), ((9, 10, 11, 12), (512,))]


def test_saves_follow_the_prefill_and_pin_their_blocks(scheduler: SchedulerSide, backend: Faulty) -> None:
    asked = request("r", 300)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    assert scheduler.build_meta(step({"r": 60})).saves == []
    asked.num_computed_tokens = 60
    (save,) = scheduler.build_meta(step({"r": 140})).saves
    assert [run.shards[0].start for run in save.runs] == [0, 64, 128]
    assert save.runs[0].blocks == ((1, 2, 3, 4), (504,))
    assert scheduler.pool.pinned == 15 and scheduler.holds_blocks
    scheduler.update(KVConnectorOutput(kv_connector_worker_meta=SavesDone(Counter({save.job: 1}))))
    assert scheduler.pool.pinned == 0 and not scheduler.holds_blocks
    asked.num_computed_tokens = 200
    (save,) = scheduler.build_meta(step({"r": 100})).saves
    assert [run.shards[0].start for run in save.runs] == [192], "each run once"


def test_what_the_store_has_is_not_saved_again(scheduler: SchedulerSide, backend: Faulty) -> None:
    fill(backend, 2)
    asked = request("r", 300)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    (save,) = scheduler.build_meta(step({"r": 300})).saves
    assert [run.shards[0].start for run in save.runs] == [128, 192]


def test_a_run_whose_window_is_gone_is_not_saved(scheduler: SchedulerSide) -> None:
    asked = request("r", 128)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    ids = tables()
    ids[1][3] = 0
    (save,) = scheduler.build_meta(step({"r": 128}, ids)).saves
    assert [run.shards[0].start for run in save.runs] == [64]
    assert scheduler.stats.get("save_runs", outcome="window gone") == 1


def test_drafts_are_not_final_and_generated_runs_are_saved_at_the_end(scheduler: SchedulerSide) -> None:
    asked = request("r", 100)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    scheduler.build_meta(step({"r": 100}))
    asked.all_token_ids = asked.all_token_ids + [7] * 40
    asked.num_computed_tokens, asked.num_in_flight_tokens = 132, 6
    assert scheduler.build_meta(step({"r": 6})).saves == []
    asked.num_in_flight_tokens = 0
    asked.status = RequestStatus.FINISHED_STOPPED
    scheduler.finished(asked, tables())
    (save,) = scheduler.build_meta(step({})).saves
    assert [run.shards[0].start for run in save.runs] == [64]


def test_an_aborted_lookup_and_an_aborted_load_release_everything(
    scheduler: SchedulerSide, backend: Faulty
) -> None:
    gate = threading.Event()
    backend.before = lambda op: hang(gate)
    asked = request("r", 300)
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (None, False)
    asked.status = RequestStatus.FINISHED_ABORTED
    scheduler.finished(asked, ([], []))
    gate.set()
    fill(backend, 3)
    asked = request("r", 300)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    scheduler.after_alloc(asked, SimpleNamespace(get_block_ids=tables), 192)
    asked.num_computed_tokens, asked.status = 192, RequestStatus.FINISHED_ABORTED
    scheduler.finished(asked, tables())
    assert scheduler.build_meta(step({})).saves == [], "blocks that nothing was loaded into are not saved"
    assert scheduler.pool.pinned == 0 and scheduler._requests == {}
    scheduler.update(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))


def test_a_backend_that_hangs_is_a_miss_after_the_deadline(backend: Faulty) -> None:
    gate = threading.Event()
    backend.before = lambda op: hang(gate)
    scheduler = side(backend, lookup_deadline_s=0.02, io_threads=1)
    first, second = request("a", 300), request("b", 300)
    scheduler.on_new_request(first)
    assert settled(scheduler, first) == (0, False)
    assert scheduler.stats.get("lookups", outcome="deadline") == 1
    scheduler.on_new_request(second)
    assert scheduler.matched_tokens(second, 0) == (0, False), "refused at once while all threads hang"
    assert scheduler.stats.get("lookups", outcome="refused") == 1
    gate.set()
    scheduler.close()


def test_a_failed_load_is_computed_and_offered_to_the_store_again(
    scheduler: SchedulerSide, backend: Faulty
) -> None:
    fill(backend, 3)
    asked = request("r", 300)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    scheduler.after_alloc(asked, SimpleNamespace(get_block_ids=tables), 192)
    scheduler.build_meta(step({}))
    scheduler.update(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.stats.get("loaded_tokens") == 0
    (save,) = scheduler.build_meta(step({"r": 300})).saves
    assert len(save.runs) == 4


def test_saves_wait_while_too_many_blocks_are_pinned(backend: Faulty) -> None:
    scheduler = side(backend, max_pinned_fraction=0.01)
    for name in ("a", "b"):
        asked = request(name, 128)
        scheduler.on_new_request(asked)
        settled(scheduler, asked)
    assert len(scheduler.build_meta(step({"a": 128})).saves) == 1
    assert scheduler.build_meta(step({"b": 128})).saves == []
    assert scheduler.stats.get("saves_deferred") == 1
    scheduler.update(KVConnectorOutput(kv_connector_worker_meta=SavesDone(Counter({0: 1}))))
    asked.num_computed_tokens = 127
    assert len(scheduler.build_meta(step({"b": 1})).saves) == 1
    scheduler.close()


@pytest.mark.parametrize("more", [{"lora_request": "x"}, {"prompt_embeds": "x"}, {"prompt_token_ids": None}])
def test_requests_that_the_store_cannot_serve_pass_by(scheduler: SchedulerSide, more: dict[str, Any]) -> None:
    asked = request("r", 300, **more)
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.build_meta(step({"r": 300})).saves == []
    scheduler.finished(asked, tables())


@pytest.mark.parametrize(
    ("params", "extra", "code", "ttl"),
    [
        (None, None, 1, 3 * 86_400),
        ({"prefix_store": {"class": "chat"}}, None, 2, 7 * 86_400),
        ({"prefix_store": {"ttl_s": 300}}, None, 1, 300),
        (None, {"prefix_store_class": "chat", "prefix_store_ttl_s": "60"}, 2, 60),
        ({"prefix_store": {"class": "agnet"}}, None, 1, 3 * 86_400),
        ({"do_remote_prefill": True}, None, 1, 3 * 86_400),
    ],
)
def test_the_traffic_class_of_a_request(
    scheduler: SchedulerSide, params: Any, extra: Any, code: int, ttl: float
) -> None:
    sampling = SimpleNamespace(extra_args=extra)
    asked = request("r", 128, kv_transfer_params=params, sampling_params=sampling)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    (save,) = scheduler.build_meta(step({"r": 128})).saves
    assert (save.choice.code, save.choice.ttl_s) == (code, ttl)


# ── a prompt that another engine goes on with ──

KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilled(
    scheduler: SchedulerSide, prompt: int, status: Any = RequestStatus.FINISHED_LENGTH_CAPPED
) -> Any:
    """What a prefill engine says of a prompt that it has computed in one step."""
    asked = request("p", prompt, kv_transfer_params=KEEP)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    scheduler.build_meta(step({"p": prompt}))
    asked.num_computed_tokens, asked.status = prompt, status
    return scheduler.finished(asked, tables())


def test_what_a_prefill_engine_hands_over(backend: Faulty) -> None:
    scheduler = side(backend, hand_over=True)
    fill(backend, 2)
    assert prefilled(scheduler, 200) == {"prefix_store": {"tokens": 192}}, (
        "two found, one written, eight left"
    )
    assert prefilled(scheduler, 40) == {"prefix_store": {"tokens": 0}}
    assert prefilled(scheduler, 200, RequestStatus.FINISHED_ABORTED) is None
    scheduler.close()


def test_nothing_is_handed_over_by_an_engine_that_is_not_told_to(scheduler: SchedulerSide) -> None:
    assert prefilled(scheduler, 200) is None


def test_what_is_handed_over_is_saved_whatever_admission_says(backend: Faulty) -> None:
    scheduler = side(backend, hand_over=True, min_prompt_tokens=10_000)
    plain = request("r", 200)
    scheduler.on_new_request(plain)
    settled(scheduler, plain)
    assert scheduler.build_meta(step({"r": 200})).saves == []
    assert prefilled(scheduler, 200) == {"prefix_store": {"tokens": 192}}
    scheduler.close()


def test_a_gap_ends_what_is_handed_over(backend: Faulty) -> None:
    """The second run's window blocks are gone, so that a decode engine could not go beyond the first."""
    scheduler = side(backend, hand_over=True)
    asked = request("p", 200, kv_transfer_params=KEEP)
    scheduler.on_new_request(asked)
    settled(scheduler, asked)
    full, window = tables()
    window[6:8] = [0, 0]
    scheduler.build_meta(step({"p": 200}, (full, window)))
    asked.num_computed_tokens, asked.status = 200, RequestStatus.FINISHED_LENGTH_CAPPED
    assert scheduler.finished(asked, (full, window)) == {"prefix_store": {"tokens": 64}}
    scheduler.close()


def test_a_decode_engine_waits_for_what_is_still_being_written(backend: Faulty) -> None:
    scheduler = side(backend, hand_over=True, hand_over_wait_s=30.0)
    fill(backend, 1)
    asked = request("d", 200, kv_transfer_params={"prefix_store": {"tokens": 192}})
    scheduler.on_new_request(asked)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        assert scheduler.matched_tokens(asked, 0) == (None, False)
        scheduler.build_meta(step({}))  # returns although nothing was scheduled
    fill(backend, 3)
    assert settled(scheduler, asked) == (192, True)
    assert scheduler.stats.get("hand_overs", outcome="whole") == 1
    scheduler.close()


def test_what_never_comes_is_computed_and_the_next_waits_less(backend: Faulty) -> None:
    scheduler = side(backend, hand_over=True, hand_over_wait_s=0.2)
    fill(backend, 1)
    for number, patience in enumerate((0.2, 0.1, 0.05, 0.05)):
        asked = request(f"d{number}", 200, kv_transfer_params={"prefix_store": {"tokens": 192}})
        assert scheduler._patience_s == patience
        scheduler.on_new_request(asked)
        assert settled(scheduler, asked) == (64, True)
    assert scheduler.stats.get("hand_overs", outcome="late") == 4
    fill(backend, 3)
    asked = request("whole", 200, kv_transfer_params={"prefix_store": {"tokens": 192}})
    scheduler.on_new_request(asked)
    assert settled(scheduler, asked) == (192, True) and scheduler._patience_s == 0.2
    scheduler.close()


@pytest.mark.parametrize("tokens", [0, 63, -5, "x", None, 1 << 60])
def test_what_is_claimed_is_only_a_hint(backend: Faulty, tokens: Any) -> None:
    scheduler = side(backend, hand_over=True, hand_over_wait_s=0.1)
    fill(backend, 1)
    asked = request("d", 200, kv_transfer_params={"prefix_store": {"tokens": tokens}})
    scheduler.on_new_request(asked)
    assert settled(scheduler, asked) == (64, True)
    scheduler.close()


def test_an_abort_while_waiting_leaves_nothing(backend: Faulty) -> None:
    scheduler = side(backend, hand_over=True, hand_over_wait_s=30.0)
    asked = request("d", 200, kv_transfer_params={"prefix_store": {"tokens": 192}})
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (None, False)
    asked.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(asked, ([], [])) is None
    assert not scheduler._has_pending() and not scheduler._requests
    scheduler.close()
