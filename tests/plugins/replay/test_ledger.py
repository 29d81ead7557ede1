"""What is remembered of requests and counted: decisions become facts when a request is scheduled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_deepinfer_plugins.replay.ledger import Ledger
from vllm_deepinfer_plugins.replay.message import Start

from vllm_deepinfer.policy.replay import Way

WINDOW, ROWS = 128, 140


def request(prompt: int = 1000, computed: int = 0, every_row: bool = False) -> Any:
    params = SimpleNamespace(prompt_logprobs=0 if every_row else None)
    return SimpleNamespace(
        request_id="r", num_prompt_tokens=prompt, num_computed_tokens=computed, sampling_params=params
    )


def ledger(rows: int | None = ROWS) -> Ledger:
    return Ledger(WINDOW, rows)


def test_a_cold_request() -> None:
    book = ledger()
    book.cold("r")
    assert book.begin(request()) == Start()
    entry = book.find("r")
    assert entry is not None and (entry.floor, entry.behind, entry.begun) == (0, 860, True)
    book.end("r")
    assert book.find("r") is None


def test_a_replay_is_counted_chunk_by_chunk() -> None:
    book = ledger()
    book.replayed("r", 512, saved=0.25)
    assert book.counts.saved == 0, "it may be decided anew before it is scheduled"
    assert book.begin(request()) == Start(floor=384, hit=512)
    assert book.counts.saved == 250_000
    for end, count, replayed in ((484, 100, 100), (600, 116, 128), (1000, 400, 128)):
        book.advance(request(computed=end), count)
        assert book.counts.replayed_tokens == replayed
    assert book.take_reached() == [("r", 512), ("r", 999)] and book.take_reached() == []
    assert book.counts.trimmed_rows == 860 - 384


def test_a_replay_that_is_scheduled_twice_counts_what_is_computed_twice() -> None:
    book = ledger()
    for _ in range(2):
        book.replayed("r", 512, saved=0.0)
        book.begin(request())
        book.advance(request(computed=512), 128)
    assert book.counts.replayed_tokens == 256


def test_a_failed_load_leaves_less_than_a_window() -> None:
    """vLLM then computes from the start, but what is cached is still not written."""
    book = ledger()
    book.replayed("r", 64, saved=0.0)
    assert book.begin(request()) == Start(floor=0, hit=64)


def test_a_restored_window() -> None:
    book = ledger()
    book.restored("r", 960, behind=900, saved=0.1)
    assert book.begin(request()) == Start()
    entry = book.find("r")
    assert entry is not None and (entry.floor, entry.behind, entry.way) == (832, 900, Way.RESTORE)
    assert book.counts.restored_windows == 1 and book.counts.replayed_tokens == 0
    book.restored("r", 512, behind=500, saved=0.1)
    book.begin(request())
    entry = book.find("r")
    assert entry is not None and entry.behind == 860, "rows before it are trimmed, so nothing of it is left"


def test_window_kv_from_a_connector() -> None:
    book = ledger()
    book.loaded("r", 999)
    assert book.begin(request()) == Start()
    book.advance(request(computed=1000), 1)
    assert book.counts.replayed_tokens == 0
    entry = book.find("r")
    assert entry is not None and entry.floor == 871 and entry.behind == 871


def test_declined_hits_count_once() -> None:
    book = ledger()
    for _ in range(3):  # asked for again while it waits
        book.declined.add("r")
        book.cold("r")
    book.begin(request())
    book.begin(request())
    assert book.counts.declined_hits == 1


def test_who_keeps_every_row() -> None:
    book = ledger()
    assert book.start_behind(request(every_row=True)) == 0 and book.start_behind(request()) == 860
    assert ledger(rows=None).start_behind(request()) == 0
    book.advance(request(computed=1000, every_row=True), 1000)
    assert book.counts.trimmed_rows == 0


def test_decodes_count_nothing() -> None:
    book = ledger()
    book.cold("r")
    book.begin(request())
    book.advance(request(computed=1001), 1)
    assert book.counts.trimmed_rows == 0 and book.take_reached() == []


def test_inactive_without_either() -> None:
    assert not Ledger(0, None).active
    assert Ledger(0, 5).active and Ledger(5, None).active
