"""ResponseStore: stored responses in an embedded SQLite file, by tenant, with a time to live.

Each row holds one turn: its own input items, its output items and the id of the turn before. A conversation
is read by walking back, so a long one costs its length once and not per turn.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Item = dict[str, Any]
T = TypeVar("T")

_ORPHANS = """
UPDATE responses SET document = json_set(document, '$.status', 'failed', '$.error',
    json('{"code": "server_error", "message": "the server was stopped before this response was complete."}'))
WHERE json_extract(document, '$.status') IN ('queued', 'in_progress')
"""
SWEEP_EVERY = 64  # puts; the sweep walks an index over all rows

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT NOT NULL, tenant TEXT NOT NULL, previous TEXT, stored REAL NOT NULL, expires REAL NOT NULL,
    document TEXT NOT NULL, input TEXT NOT NULL, PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_expires ON responses (expires);
"""
_ONE = """
SELECT id, previous, document, input FROM responses WHERE tenant = :tenant AND id = :id AND expires > :now
"""
_WALK = """
WITH RECURSIVE chain (depth, id, previous, document, input) AS (
    SELECT 0, id, previous, document, input FROM responses WHERE tenant = :tenant AND id = :id AND expires >
    :now UNION ALL
    SELECT chain.depth + 1, r.id, r.previous, r.document, r.input FROM responses r, chain
    WHERE r.tenant = :tenant AND r.id = chain.previous AND r.expires > :now AND chain.depth < 100000
) SELECT id, previous, document, input FROM chain ORDER BY depth DESC
"""


class MissingResponse(LookupError):
    """There is no such response for this tenant (any more); `args[0]` is its id."""


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """One turn.

    Attributes:
        document: the response as the API shows it. input: the turn's own input items.
        previous: id of the turn before.
    """

    id: str
    tenant: str
    document: dict[str, Any]
    input: list[Item] = field(default_factory=list)
    previous: str | None = None


class ResponseStore:
    """Use after `open`, from one event loop; SQLite runs in a thread of its own.

    Args:
        path: the file; None: in memory. ttl_s: life of a response. max_responses: most kept, give or take a
            sweep.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        ttl_s: float,
        max_responses: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._ttl_s = ttl_s
        self._max = max_responses
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response store")
        self._db: sqlite3.Connection | None = None
        self._puts = 0

    async def open(self) -> None:
        """Open or create the file; what a stopped server left unfinished is failed. Raises: sqlite3.Error."""
        await self._run(self._connect)

    async def close(self) -> None:
        """Close the file. Idempotent."""
        if self._db is not None:
            await self._run(self._db.close)
            self._db = None
        self._thread.shutdown()

    async def put(self, response: StoredResponse) -> None:
        """Store a response or replace it."""
        await self._run(self._put, response)

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises: MissingResponse."""
        return (await self._run(self._read, _ONE, response_id, tenant))[0]

    async def chain(self, response_id: str, tenant: str) -> list[StoredResponse]:
        """The conversation that ends with a response, oldest turn first. Raises: MissingResponse."""
        turns = await self._run(self._read, _WALK, response_id, tenant)
        if turns[0].previous is not None:
            raise MissingResponse(turns[0].previous)
        return turns

    async def delete(self, response_id: str, tenant: str) -> None:
        """Raises: MissingResponse."""
        if not await self._run(self._delete, response_id, tenant):
            raise MissingResponse(response_id)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _connect(self) -> None:
        self._db = sqlite3.connect(self._path or ":memory:", check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        self._db.execute(_ORPHANS)

    @property
    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise RuntimeError("the response store is not open")
        return self._db

    def _put(self, response: StoredResponse) -> None:
        db, now = self._open_db, self._clock()
        encode = msgspec.json.encode
        row = (
            response.id,
            response.tenant,
            response.previous,
            now,
            now + self._ttl_s,
            encode(response.document).decode(),
            encode(response.input).decode(),
        )
        db.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._puts += 1
        if self._puts % SWEEP_EVERY:
            return
        db.execute("DELETE FROM responses WHERE expires <= ?", (now,))
        db.execute(
            "DELETE FROM responses WHERE (tenant, id) IN "
            "(SELECT tenant, id FROM responses ORDER BY expires DESC LIMIT -1 OFFSET ?)",
            (self._max,),
        )

    def _read(self, query: str, response_id: str, tenant: str) -> list[StoredResponse]:
        values = {"id": response_id, "tenant": tenant, "now": self._clock()}
        decode = msgspec.json.decode
        rows = [
            StoredResponse(
                id=id_, tenant=tenant, document=decode(document), input=decode(items), previous=previous
            )
            for id_, previous, document, items in self._open_db.execute(query, values)
        ]
        if not rows:
            raise MissingResponse(response_id)
        return rows

    def _delete(self, response_id: str, tenant: str) -> bool:
        cursor = self._open_db.execute(
            "DELETE FROM responses WHERE tenant = ? AND id = ? AND expires > ?",
            (tenant, response_id, self._clock()),
        )
        return cursor.rowcount > 0
