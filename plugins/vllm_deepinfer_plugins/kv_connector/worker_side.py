"""The half of the connector that lives in a worker: moves bytes, in threads of its own.

A run is checked while it is copied. One that turns out wrong fails its load, and vLLM computes all of that
request's tokens into the same blocks: nothing is cached or looked at before the load is reported as whole.

A job that is past its deadline is given up under its gate: after that it can neither write into blocks nor
read from them, so the blocks may go to somebody else however long its thread still hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_deepinfer.store.codec import Opened
from vllm_deepinfer.store.errors import StoreUnavailable
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.prefix_store import PrefixStore
from vllm_deepinfer.store.sweeper import Sweeper, sweep_quietly
from vllm_deepinfer.store.workers import Job, Workers

from .metadata import LoadTask, RunBlocks, SavesDone, SaveTask, StoreMetadata
from .pages import PagedKV
from .settings import StoreSettings

logger = logging.getLogger(__name__)
_SAVE_BATCH = 8
_LOAD_BATCH = 16  # 16 MiB that are pinned, or lie in buffers, per thread
_SWEEP_PAUSE_S = 5.0


@dataclass
class _Transfer:
    """A load or a save in flight: its jobs, and the gate that each passes before it touches KV."""

    deadline: float
    jobs: list[Job] = field(default_factory=list)
    gate: threading.Lock = field(default_factory=threading.Lock)
    cancelled: bool = False
    failed: bool = False
    ready: torch.Event | None = None

    @property
    def done(self) -> bool:
        return all(job.done for job in self.jobs)


class WorkerSide:
    """See the module.

    Args:
        settings: The operator's.
        store: Where to.
        kv: The engine's pages.
        shard: Which of a run's keys is this rank's.
        writes: Whether this rank saves; of ranks with the same KV one does.
        sweeper: Run from time to time, or None.
    """

    def __init__(
        self,
        settings: StoreSettings,
        store: PrefixStore,
        kv: PagedKV,
        *,
        shard: int,
        writes: bool,
        sweeper: Sweeper | None,
    ) -> None:
        self._settings, self._store, self._kv = settings, store, kv
        self._shard, self._writes = shard, writes
        self._loaders = Workers(settings.io_threads, name="store-load")
        self._savers = Workers(max(1, settings.io_threads // 2), name="store-save")
        self._loads: dict[str, _Transfer] = {}
        self._saves: dict[int, _Transfer] = {}
        self._closed = threading.Event()
        self._sweep_now = threading.Event()
        if sweeper is not None:
            threading.Thread(target=self._sweep, args=(sweeper,), name="store-sweep", daemon=True).start()

    def submit(self, meta: StoreMetadata, saves: bool) -> None:
        """Start a step's loads, or, when its forward pass has been issued, its saves."""
        if not saves:
            for load in meta.loads:
                self._load(load)
            return
        for save in meta.saves:
            self._save(save)

    # ── loads ──

    def _load(self, task: LoadTask) -> None:
        transfer = _Transfer(time.monotonic() + self._settings.load_deadline_s)
        self._loads[task.request] = transfer
        stripes = min(len(task.runs), self._settings.io_threads)
        for i in range(stripes):
            runs = task.runs[i::stripes]
            try:
                transfer.jobs.append(self._loaders.submit(partial(self._read, transfer, task, runs)))
            except StoreUnavailable as error:
                logger.warning("prefix store: a load is refused, its request is computed: %s", error)
                transfer.failed = True

    def _read(self, transfer: _Transfer, task: LoadTask, runs: Sequence[RunBlocks], job: Job) -> None:
        for first in range(0, len(runs), _LOAD_BATCH):
            batch = runs[first : first + _LOAD_BATCH]
            if transfer.failed or transfer.cancelled:
                return
            keys = [run.shards[self._shard] for run in batch]
            copy = partial(self._copy, transfer, task.start, batch)
            if not self._store.load_into(keys, self._kv.sections, copy):
                transfer.failed = True
                return

    def _copy(
        self, transfer: _Transfer, start: int, runs: Sequence[RunBlocks], i: int, loaded: Opened
    ) -> bool:
        """One run into its blocks, unless nobody waits for it any more."""
        with transfer.gate:
            if transfer.cancelled or transfer.failed:
                return False
            self._kv.scatter(loaded.values, self._targets(runs[i], start), loaded.check)
            return True

    def _targets(self, run: RunBlocks, start: int) -> list[list[tuple[int, int]]]:
        """Per group the blocks to write: those that exist and hold no token before `start`."""
        targets = []
        end = run.shards[0].start + run.shards[0].tokens
        for group, ids in zip(self._kv.groups, run.blocks, strict=True):
            first = end - len(ids) * group.block_size
            targets.append([(i, b) for i, b in enumerate(ids) if b and first + i * group.block_size >= start])
        return targets

    # ── saves ──

    def _save(self, task: SaveTask) -> None:
        transfer = _Transfer(time.monotonic() + self._settings.save_deadline_s)
        self._saves[task.job] = transfer
        if not self._writes:
            return
        if self._kv.device.type != "cpu":
            transfer.ready = torch.Event()
            transfer.ready.record()
        try:
            transfer.jobs.append(self._savers.submit(partial(self._write, transfer, task)))
        except StoreUnavailable as error:
            self._store.stats.add("save_runs", len(task.runs), outcome="refused")
            logger.debug("prefix store: a save is refused: %s", error)

    def _write(self, transfer: _Transfer, task: SaveTask, job: Job) -> None:
        if transfer.ready is not None:
            transfer.ready.synchronize()
        for start in range(0, len(task.runs), _SAVE_BATCH):
            batch = {run.shards[self._shard]: run for run in task.runs[start : start + _SAVE_BATCH]}
            missing = set(self._store.missing(list(batch)))
            gathered: list[tuple[Key, list[memoryview]]] = []
            with transfer.gate:
                if transfer.cancelled:
                    return
                for key, run in batch.items():
                    if key in missing:
                        gathered.append((key, self._kv.gather(run.blocks)))
            if gathered:
                self._store.save(gathered, self._kv.sections, task.choice)

    # ── results ──

    def results(self) -> KVConnectorTransferResults:
        """Loads that have ended since the last call; those that failed are in both sets."""
        found = KVConnectorTransferResults()
        for request, transfer in list(self._loads.items()):
            if not transfer.done and self._overdue(transfer, self._loaders, "load"):
                transfer.failed = True
            if transfer.done or transfer.cancelled:
                del self._loads[request]
                found.finished_recving.add(request)
                if transfer.failed or any(self._broke(job, "load") for job in transfer.jobs):
                    found.failed_recving.add(request)
                    self._store.stats.add("load_failures")
        return found

    def saves_done(self) -> SavesDone | None:
        """Saves that have ended since the last call, well or not."""
        done = SavesDone(Counter())
        for job, transfer in list(self._saves.items()):
            if transfer.done or self._overdue(transfer, self._savers, "save"):
                del self._saves[job]
                done.jobs[job] = 1
                for one in transfer.jobs:
                    self._broke(one, "save")
        return done if done.jobs else None

    def _overdue(self, transfer: _Transfer, workers: Workers, op: str) -> bool:
        """Give a transfer up that has not ended in time."""
        if time.monotonic() < transfer.deadline:
            return False
        with transfer.gate:
            transfer.cancelled = True
        for job in transfer.jobs:
            workers.give_up(job)
        self._store.stats.add("deadlines", op=op)
        logger.warning("prefix store: a %s has not ended in time and is given up", op)
        return True

    def _broke(self, job: Job, op: str) -> bool:
        if not job.done or job.error is None:
            return False
        self._store.stats.add("failures", op=op)
        logger.error("prefix store: a %s ended with %r", op, job.error)
        return True

    @property
    def gauges(self) -> dict[str, float]:
        """Queue depths and hung calls, now."""
        return {
            "load_queue": self._loaders.depth,
            "save_queue": self._savers.depth,
            "hung": self._loaders.hung + self._savers.hung,
        }

    def sweep_soon(self) -> None:
        """The store is full."""
        self._sweep_now.set()

    def _sweep(self, sweeper: Sweeper) -> None:
        while not self._closed.is_set():
            self._sweep_now.wait(self._settings.sweep_interval_s)
            self._sweep_now.clear()
            if not self._closed.is_set():
                sweep_quietly(sweeper, self._store.stats)
                self._closed.wait(_SWEEP_PAUSE_S)

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the saves in flight end, as far as they do in time."""
        self._closed.set()
        self._sweep_now.set()
        if not self._savers.drain(timeout_s):
            logger.warning("prefix store: %d saves had not ended and are lost", self._savers.depth)
        for workers in (self._loaders, self._savers):
            workers.close()
