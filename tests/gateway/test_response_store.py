"""ResponseStore: turns, tenants, time to live, bounds; in memory and on disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from vllm_deepinfer.gateway.response_store import SWEEP_EVERY, MissingResponse, ResponseStore, StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def turn(name: str, previous: str | None = None, tenant: str = "t", **document: Any) -> StoredResponse:
    return StoredResponse(
        id=name,
        tenant=tenant,
        document={"id": name, "status": "completed"} | document,
        input=[{"role": "user", "content": f"input of {name} \x00 😀"}],
        previous=previous,
    )


@pytest_asyncio.fixture(params=["memory", "disk"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[ResponseStore, Clock]]:
    clock = Clock()
    path = tmp_path / "responses.sqlite" if request.param == "disk" else None
    opened = ResponseStore(path, ttl_s=100, max_responses=1000, clock=clock)
    await opened.open()
    yield opened, clock
    await opened.close()


Store = tuple[ResponseStore, Clock]


async def test_what_is_put_can_be_got(store: Store) -> None:
    responses, _ = store
    await responses.put(turn("a"))
    assert await responses.get("a", "t") == turn("a")
    await responses.put(turn("a", status="failed"))
    assert (await responses.get("a", "t")).document["status"] == "failed"


async def test_a_chain_is_oldest_first(store: Store) -> None:
    responses, _ = store
    previous = None
    for name in "abcde":
        await responses.put(turn(name, previous))
        previous = name
    assert [t.id for t in await responses.chain("d", "t")] == ["a", "b", "c", "d"]
    assert (await responses.chain("e", "t"))[2] == turn("c", "b")


async def test_branches_share_their_trunk(store: Store) -> None:
    responses, _ = store
    for name, previous in (("a", None), ("b", "a"), ("c", "a")):
        await responses.put(turn(name, previous))
    assert [t.id for t in await responses.chain("b", "t")] == ["a", "b"]
    assert [t.id for t in await responses.chain("c", "t")] == ["a", "c"]


async def test_tenants_see_their_own_only(store: Store) -> None:
    responses, _ = store
    await responses.put(turn("a", tenant="one"))
    await responses.put(turn("b", "a", tenant="two"))
    with pytest.raises(MissingResponse, match="a"):
        await responses.get("a", "two")
    with pytest.raises(MissingResponse) as caught:
        await responses.chain("b", "two")  # its past is another tenant's
    assert caught.value.args == ("a",)
    with pytest.raises(MissingResponse):
        await responses.delete("a", "two")
    assert (await responses.get("a", "one")).id == "a"


async def test_deleting_breaks_the_chain_and_says_where(store: Store) -> None:
    responses, _ = store
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await responses.put(turn(name, previous))
    await responses.delete("b", "t")
    with pytest.raises(MissingResponse) as caught:
        await responses.chain("c", "t")
    assert caught.value.args == ("b",)
    with pytest.raises(MissingResponse):
        await responses.delete("b", "t")


async def test_time_to_live(store: Store) -> None:
    responses, clock = store
    await responses.put(turn("a"))
    clock.now += 60
    await responses.put(turn("b", "a"))
    clock.now += 39
    assert len(await responses.chain("b", "t")) == 2
    clock.now += 2
    with pytest.raises(MissingResponse):
        await responses.get("a", "t")
    with pytest.raises(MissingResponse):
        await responses.chain("b", "t")
    assert (await responses.get("b", "t")).id == "b"


async def test_expired_rows_and_the_oldest_ones_leave_the_file(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "r.sqlite"
    responses = ResponseStore(path, ttl_s=1000, max_responses=10, clock=clock)
    await responses.open()
    for i in range(SWEEP_EVERY * 2):
        clock.now += 1
        await responses.put(turn(f"r{i}"))
    await responses.close()
    with sqlite3.connect(path) as db:
        kept = {row[0] for row in db.execute("SELECT id FROM responses")}
    assert kept == {f"r{i}" for i in range(SWEEP_EVERY * 2 - 10, SWEEP_EVERY * 2)}


async def test_responses_survive_a_restart_and_unfinished_ones_are_failed(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    first = ResponseStore(path, ttl_s=100, max_responses=10)
    await first.open()
    await first.put(turn("done"))
    await first.put(turn("running", status="in_progress", background=True))
    await first.put(turn("waiting", status="queued", background=True))
    await first.close()
    second = ResponseStore(path, ttl_s=100, max_responses=10)
    await second.open()
    assert (await second.get("done", "t")).document["status"] == "completed"
    for name in ("running", "waiting"):
        document = (await second.get(name, "t")).document
        assert document["status"] == "failed" and document["error"]["code"] == "server_error"
    await second.close()


async def test_many_at_once(store: Store) -> None:
    responses, _ = store
    await asyncio.gather(*(responses.put(turn(f"r{i}")) for i in range(100)))
    found = await asyncio.gather(*(responses.get(f"r{i}", "t") for i in range(100)))
    assert [t.id for t in found] == [f"r{i}" for i in range(100)]


async def test_using_a_closed_store_is_an_error() -> None:
    responses = ResponseStore(None, ttl_s=1, max_responses=1)
    with pytest.raises(RuntimeError, match="not open"):
        await responses.get("a", "t")
    await responses.open()
    await responses.close()
    await responses.close()
