"""The half of the connector beside the scheduler: what to load, what to save. It never waits for I/O.

A request's lookup begins when it arrives, in a worker thread; until it is answered, the scheduler asks again.
Blocks of a save are pinned by a reference of their own in the block pool, so that an abort, a preemption or
the end of the request needs no care: the blocks stay until every rank has reported the save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from vllm_deepinfer.policy.admission import Admission
from vllm_deepinfer.policy.retention import Choice, Retention
from vllm_deepinfer.store.errors import StoreUnavailable
from vllm_deepinfer.store.keys import Image, Key, chain, root
from vllm_deepinfer.store.prefix_store import PrefixStore
from vllm_deepinfer.store.stats import StoreStats
from vllm_deepinfer.store.workers import Job, Workers

from ..hand_over.settings import STORE_KEY
from .groups import StoredGroup
from .metadata import LoadTask, RunBlocks, SavesDone, SaveTask, StoreMetadata
from .prefill_rate import PrefillRate
from .request_options import options_of
from .settings import StoreSettings
from .tracked import Tracked

logger = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.001  # an engine with nothing to compute polls a thousand times a second, not a million
_LOOK_AGAIN_S = 0.005  # between two looks for what another engine is still writing
_LEAST_PATIENCE_S = 0.05
_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class SchedulerSide:
    """See the module.

    Args:
        settings: The operator's.
        store: For lookups.
        groups: The stored groups.
        run_tokens: Tokens per object.
        fingerprint: Of the engine.
        shards: Parts of the KV over ranks; each has keys of its own.
        ranks: Workers that report a save.
        num_blocks: Of the pool.
        reads, writes: What the role allows.
    """

    def __init__(
        self,
        settings: StoreSettings,
        store: PrefixStore,
        groups: tuple[StoredGroup, ...],
        run_tokens: int,
        fingerprint: bytes,
        *,
        shards: int,
        ranks: int,
        num_blocks: int,
        reads: bool,
        writes: bool,
    ) -> None:
        self._settings, self._store, self._groups = settings, store, groups
        self._run, self._fingerprint, self._shards, self._ranks = run_tokens, fingerprint, shards, ranks
        self._max_pinned = int(settings.max_pinned_fraction * num_blocks)
        self._reads, self._writes = reads, writes
        self._retention: Retention = settings.retention
        self._admission = Admission(settings.rule)
        self._workers = Workers(settings.io_threads, name="store-lookup")
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadTask] = []
        self._saves: list[SaveTask] = []
        self._pins: dict[int, tuple[list[int], int]] = {}
        self._pinned_blocks = 0
        self._next_job = 0
        self._wake = threading.Event()
        self._rate = PrefillRate()
        self._patience_s = settings.hand_over_wait_s
        self.pool: Any = None  # vLLM's BlockPool, bound after construction

    @property
    def stats(self) -> StoreStats:
        """Where everything is counted."""
        return self._store.stats

    # ── arrival and lookup ──

    def on_new_request(self, request: Request) -> None:
        """Begin the lookup."""
        options = options_of(request, self._retention, self.stats)
        if options is None or request.prompt_token_ids is None:
            self.stats.add("requests", outcome="bypassed")
            return
        salt = request.cache_salt or ""
        shards = [f"{i}/{self._shards}" if self._shards > 1 else "" for i in range(self._shards)]
        tracked = Tracked(
            request,
            roots=tuple(root(self._fingerprint, salt, shard) for shard in shards),
            images=tuple(
                Image(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features
            ),
            options=options,
            choice=options.choice,
            patient_until=time.monotonic() + self._patience_s if options.expected else 0.0,
        )
        self._requests[request.request_id] = tracked
        if request.num_tokens >= self._run:
            self._begin_lookup(tracked)

    def _begin_lookup(self, tracked: Tracked) -> None:
        tokens = list(tracked.request.all_token_ids)

        def look(job: Job) -> tuple[list[list[Key]], int]:
            chains = [chain(r, tokens, self._run, tracked.images) for r in tracked.roots]
            if not (self._reads and tracked.options.load):
                return chains, 0
            found = min(self._store.lookup(keys) for keys in chains)
            if found and not job.cancelled.is_set():
                for keys in chains:
                    self._store.touch(keys[:found], tracked.choice)
            return chains, found

        try:
            tracked.lookup = self._workers.submit(look, lambda job: self._wake.set())
        except StoreUnavailable:
            self.stats.add("lookups", outcome="refused")
            tracked.found = 0

    def _settle(self, tracked: Tracked) -> bool:
        """Whether it is known what the store has; a lookup past its deadline counts as a miss."""
        job = tracked.lookup
        if tracked.found is not None or job is None:
            return tracked.found is not None
        if job.done:
            if job.error is None:
                tracked.chains, found = job.result
                if self._is_coming(tracked, found):
                    return False
                tracked.found = found
                tracked.saved = max(tracked.saved, found)
                tracked.whole = max(tracked.whole, found)
                self._count_lookup(tracked)
            else:
                self.stats.add("lookups", outcome="error")
                logger.warning("prefix store: a lookup failed and counts as a miss: %s", job.error)
                tracked.found = 0
        elif time.monotonic() - job.submitted > self._settings.lookup_deadline_s:
            self._workers.give_up(job)
            self.stats.add("lookups", outcome="deadline")
            tracked.found = 0
        else:
            return False
        tracked.lookup = None
        return True

    def _is_coming(self, tracked: Tracked, found: int) -> bool:
        """Whether another engine is still writing what this request was handed; then it is looked for again.

        What never comes is computed here. The next request then waits half as long: a store that has become
        full must not hold everybody up.
        """
        runs = min(tracked.options.expected // self._run, len(tracked.chains[0]))
        if not runs or not tracked.patient_until:
            return False
        now = time.monotonic()
        if found < runs and now < tracked.patient_until:
            tracked.lookup, tracked.again_at = None, now + _LOOK_AGAIN_S
            return True
        tracked.again_at = tracked.patient_until = 0.0
        self.stats.add("hand_overs", outcome="whole" if found >= runs else "late")
        if found >= runs:
            self._patience_s = self._settings.hand_over_wait_s
        else:
            if self._patience_s == self._settings.hand_over_wait_s:
                logger.warning(
                    "prefix store: %d of %d runs of a prompt were handed over in time; the rest is computed.",
                    found,
                    runs,
                )
            self._patience_s = max(self._patience_s / 2, _LEAST_PATIENCE_S)
        return False

    def _count_lookup(self, tracked: Tracked) -> None:
        runs, found = len(tracked.chains[0]), tracked.found or 0
        outcome = "miss" if not found else "hit" if found == runs else "partial"
        self.stats.add("lookups", outcome=outcome)
        self.stats.add("lookup_runs", runs)
        self.stats.add("lookup_runs_found", found)

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """`get_num_new_matched_tokens`: tokens beyond the local hit that can be loaded; None: ask again.

        At least one token of a request is left to compute.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.give_up or not self._reads or not tracked.options.load:
            return 0, False
        limit = (request.num_tokens - 1) // self._run * self._run
        worth = self._settings.min_load_tokens
        if limit - local < worth or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.lookup is None and tracked.found is None:
            if tracked.again_at > time.monotonic():
                return None, False
            self._begin_lookup(tracked)
        if not self._settle(tracked):
            return None, False
        hit = min((tracked.found or 0) * self._run, limit)
        if hit - local < worth:
            return 0, False
        tracked.offered = local, hit
        return hit - local, True

    # ── loads ──

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """`update_state_after_alloc`: note the load, with the blocks that it fills."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or external <= 0:
            return
        _, hit = tracked.offered
        start = hit - external
        first, last = start // self._run, hit // self._run
        ids = blocks.get_block_ids()
        runs = tuple(self._run_blocks(tracked, i, ids, allow_missing=True) for i in range(first, last))
        self._loads.append(LoadTask(request.request_id, tuple(r for r in runs if r is not None), start))
        tracked.loading = True
        tracked.found = None  # a later lookup, after a preemption, asks anew
        tracked.external = external

    def _run_blocks(
        self, tracked: Tracked, run: int, ids: Sequence[Sequence[int]], allow_missing: bool
    ) -> RunBlocks | None:
        """The blocks of a run per stored group; None when one that has to be stored is not there."""
        per_group = []
        for group in self._groups:
            table, count = ids[group.index], group.blocks(self._run)
            end = (run + 1) * self._run // group.block_size
            blocks = tuple(table[end - count : end])
            if not allow_missing and (len(blocks) < count or 0 in blocks):
                return None
            per_group.append(blocks + (0,) * (count - len(blocks)))
        return RunBlocks(tuple(keys[run] for keys in tracked.chains), tuple(per_group))

    # ── saves ──

    def build_meta(self, output: SchedulerOutput) -> StoreMetadata:
        """`build_connector_meta`: this step's loads and saves."""
        for request_id in output.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.found, tracked.lookup, tracked.loading, tracked.again_at = None, None, False, 0.0
        self._rate.step(output.total_num_scheduled_tokens, time.perf_counter())
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None and self._writes and tracked.options.save and state is not None:
                tracked.loading = False
                end = self._computed(tracked.request, scheduled) // self._run
                if end > tracked.saved:
                    self._save(tracked, end, partial(state.get_block_ids, request_id))
        meta = StoreMetadata(self._loads, self._saves)
        self._loads, self._saves = [], []
        if not output.total_num_scheduled_tokens and self._has_pending():
            self._wake.wait(_IDLE_WAIT_S)
            self._wake.clear()
        return meta

    def _computed(self, request: Request, scheduled: int) -> int:
        """Tokens whose KV is final when this step has run: drafts are not, so only the prompt is ahead."""
        done = request.num_computed_tokens - request.num_in_flight_tokens
        if not self._settings.save_output:
            done = min(done, request.num_prompt_tokens)
        return max(done, min(request.num_computed_tokens + scheduled, request.num_prompt_tokens))

    def _save(self, tracked: Tracked, end: int, ids_of: Callable[[], Any]) -> None:
        """Hand the runs up to `end` to the worker, as far as they are worth it."""
        self._settle(tracked)
        if tracked.saved >= end:
            return
        if self._pinned_blocks >= self._max_pinned:
            self.stats.add("saves_deferred")  # the next step, or the end of the request, tries again
            return
        ids = ids_of()
        if ids is None:
            return
        self._extend(tracked, end)
        runs: list[RunBlocks] = []
        for i in range(tracked.saved, end):
            if not self._admits(tracked, i):
                self.stats.add("save_runs", outcome="not admitted")
                continue
            run = self._run_blocks(tracked, i, ids, allow_missing=False)
            if run is None:
                self.stats.add("save_runs", outcome="window gone")
                continue
            runs.append(run)
            tracked.whole += tracked.whole == i
        tracked.saved = end
        if runs:
            self._queue(tuple(runs), tracked.choice)

    def _admits(self, tracked: Tracked, run: int) -> bool:
        begun = bool(tracked.offered[1]) or run > 0
        key, tokens = tracked.chains[0][run], tracked.request.num_prompt_tokens
        admitted = self._admission.admit(key.id, tracked.choice.code, begun, tokens)
        return admitted or tracked.options.keep

    def _queue(self, runs: tuple[RunBlocks, ...], choice: Choice) -> None:
        job, self._next_job = self._next_job, self._next_job + 1
        pinned = [block for run in runs for ids in run.blocks for block in ids if block]
        if self.pool is not None:
            self.pool.touch([self.pool.blocks[block] for block in pinned])
        self._pins[job] = pinned, self._ranks
        self._pinned_blocks += len(pinned)
        self._saves.append(SaveTask(job, runs, choice))
        self.stats.add("save_runs", len(runs), outcome="submitted")

    def _extend(self, tracked: Tracked, end: int) -> None:
        """Keys up to run `end`, over tokens that were generated meanwhile too."""
        if not tracked.chains:
            tracked.chains = [[] for _ in tracked.roots]
        for keys, base in zip(tracked.chains, tracked.roots, strict=True):
            if len(keys) < end:
                tokens = tracked.request.all_token_ids[: end * self._run]
                keys += chain(base, tokens, self._run, tracked.images, keys[-1] if keys else None)

    def finished(self, request: Request, ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """`request_finished_all_groups`: save what is complete; nothing delays the request's own blocks.

        Returns:
            For an engine that goes on with the prompt, what of it is in the store or on its way there.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.lookup is not None and not tracked.lookup.done:
            self._workers.give_up(tracked.lookup)
            tracked.lookup, tracked.found = None, 0
        usable = request.status != RequestStatus.FINISHED_ERROR and not tracked.loading
        if usable and self._writes and tracked.options.save:
            end = self._computed(request, 0) // self._run
            if end > tracked.saved:
                self._save(tracked, end, lambda: ids)
        if not (self._settings.hand_over and tracked.options.keep and request.status in _WELL):
            return None
        return {STORE_KEY: {"tokens": min(tracked.whole, request.num_prompt_tokens // self._run) * self._run}}

    # ── what comes back ──

    def update(self, output: KVConnectorOutput) -> None:
        """`update_connector_output`: unpin finished saves, note failed loads."""
        for request_id in output.finished_recving or ():
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.loading:
                tracked.loading = False
                if request_id not in (output.failed_recving or ()):
                    self.stats.add("loaded_tokens", tracked.external)
                    self.stats.add("recompute_seconds_saved", self._rate.seconds(tracked.external))
        for request_id in output.failed_recving or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.give_up, tracked.saved, tracked.offered = True, 0, (0, 0)
                self.stats.add("loads_recomputed")
        meta = output.kv_connector_worker_meta
        if isinstance(meta, SavesDone):
            for job, count in meta.jobs.items():
                self._unpin(job, count)

    def _unpin(self, job: int, count: int) -> None:
        blocks, remaining = self._pins[job]
        if remaining > count:
            self._pins[job] = blocks, remaining - count
            return
        del self._pins[job]
        self._pinned_blocks -= len(blocks)
        if self.pool is not None:
            self.pool.free_blocks(self.pool.blocks[block] for block in reversed(blocks))

    def _has_pending(self) -> bool:
        return bool(self._pins) or any(
            t.lookup is not None or t.loading or t.again_at for t in self._requests.values()
        )

    @property
    def holds_blocks(self) -> bool:
        """Whether a save still pins blocks: the engine has to go on stepping to hear of its end."""
        return bool(self._pins)

    def close(self) -> None:
        """End the lookup threads."""
        self._workers.close()
