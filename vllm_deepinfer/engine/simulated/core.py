"""Continuous batching without a model: what runs in each step, with which KV, and which tokens come out.

The rules are vLLM's: running requests first, in order of (priority, arrival), a decode needs one token and
its drafts, a prefill takes what is left of `max_num_batched_tokens`; when KV runs out the last running
request is preempted and later recomputed; then waiting requests are admitted in order while tokens, slots
and KV last.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random

from vllm_deepinfer.engine.simulated.config import SimulatedConfig
from vllm_deepinfer.engine.simulated.kv import BlockPool
from vllm_deepinfer.engine.simulated.sequence import SimulatedSequence
from vllm_deepinfer.policy.step_cost import Features, Work

_ORDER = attrgetter("order")


@dataclass(slots=True)
class Step:
    """One scheduled step: (sequence, tokens to compute, drafts to verify) for each that takes part."""

    batch: list[tuple[SimulatedSequence, int, int]] = field(default_factory=list)
    decodes: int = 0  # without drafts; two sums, as two dataclasses for each cost as much as the rest
    decode_context: float = 0.0
    others: Features = field(default_factory=Features)

    @property
    def features(self) -> Features:
        """What the step computes, for StepCost."""
        return self.others + Features(decodes=self.decodes, decode_context=self.decode_context)


class SimulatedCore:
    """Scheduler and KV of a simulated engine; knows no time and no event loop.

    Attributes:
        running: requests with KV, in order.
        fetches: (sequence, tokens to fetch) of requests whose fetch is to begin; the engine takes them away.
        held_blocks: blocks that no request here refers to any more, but other engines may read.
        preemptions: requests that lost their KV to others, ever.
    """

    def __init__(self, config: SimulatedConfig, rng: Random) -> None:
        self.config = config
        self.pool = BlockPool(config.blocks)
        self.running: list[SimulatedSequence] = []
        self.fetches: list[tuple[SimulatedSequence, int]] = []
        self.held_blocks = 0
        self.preemptions = 0
        self._fetching = 0  # those that have ended included: what writes into their blocks has not
        self._fetching_alive = 0
        self._rng = rng
        self._waiting: list[tuple[tuple[int, int], SimulatedSequence]] = []  # heap; the dead go when met
        self._waiting_alive = 0
        self._queued_prompt_tokens = 0

    @property
    def waiting(self) -> int:
        """Requests without KV."""
        return self._waiting_alive

    @property
    def fetching(self) -> int:
        """Requests whose KV is on its way."""
        return self._fetching_alive

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens of requests that have no token yet."""
        return self._queued_prompt_tokens

    def add(self, sequence: SimulatedSequence) -> None:
        """Queue a new request."""
        self._queued_prompt_tokens += sequence.prompt_length
        self._wait(sequence)

    def remove(self, sequence: SimulatedSequence) -> None:
        """End a request wherever it is; frees its KV. Idempotent."""
        if not sequence.alive:
            return
        sequence.alive = False
        if not sequence.generated:
            self._queued_prompt_tokens -= sequence.prompt_length
        if sequence.fetching:
            self._fetching_alive -= 1  # its blocks are free when the fetch has ended
        elif sequence.blocks:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self._waiting_alive -= 1

    def hold(self, sequence: SimulatedSequence) -> list[int]:
        """End a running request, but keep its KV; returns the blocks, for `release`."""
        sequence.alive = False
        self.running.remove(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        self.held_blocks += len(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Nobody reads these any more."""
        self.held_blocks -= len(blocks)
        self.pool.release(blocks)

    def end_fetch(self, sequence: SimulatedSequence, fetched: bool) -> None:
        """The KV of a prompt has come, but for its last token, or will not come: then it is computed here."""
        self._fetching -= 1
        sequence.source, sequence.fetching = None, False
        if not sequence.alive:
            self._free(sequence)
            return
        self._fetching_alive -= 1
        if not fetched:
            self._free(sequence)
            self._wait(sequence)
            return
        sequence.computed = sequence.total - 1
        self.publish(sequence)
        insort(self.running, sequence, key=_ORDER)

    def schedule(self) -> Step:
        """Decide the next step; an empty batch only when there is no request, or KV lies with others."""
        step, budget = Step(), self.config.max_num_batched_tokens
        before = self.preemptions
        for sequence in tuple(self.running):
            if budget <= 0:
                break
            if sequence.blocks:  # not preempted by an earlier one in this very loop
                budget -= self._continue(sequence, budget, step)
        if self.preemptions == before:
            self._admit(budget, step)
        others = self._fetching or self.held_blocks
        assert step.batch or others or not (self.running or self.waiting), "a lone request always fits"
        return step

    def publish(self, sequence: SimulatedSequence) -> None:
        """Let others find the blocks that have become full."""
        if not self.config.prefix_caching:
            return
        full = sequence.computed // self.config.block_size
        if full > sequence.published:
            sequence.extend_keys(self.config.block_size, sequence.computed)
            for index in range(sequence.published, full):
                self.pool.publish(sequence.blocks[index], sequence.keys[index])
            sequence.published = full

    def commit(self, sequence: SimulatedSequence, tokens: int) -> bool:
        """Note that `tokens` more have KV. Returns whether the sequence now samples."""
        sequence.computed += tokens
        self.publish(sequence)
        return sequence.computed == sequence.total

    def accept(self, drafts: int) -> int:
        """Draw how many drafts in a row are accepted."""
        chance = self.config.speculation.acceptance if self.config.speculation else 0.0
        accepted = 0
        while accepted < drafts and self._rng.random() < chance:
            accepted += 1
        return accepted

    def append(self, sequence: SimulatedSequence, token: int) -> None:
        """Add a token to the answer."""
        if not sequence.generated:
            self._queued_prompt_tokens -= sequence.prompt_length
        sequence.generated.append(token)

    def _continue(self, sequence: SimulatedSequence, budget: int, step: Step) -> int:
        tokens = min(sequence.total - sequence.computed, budget)
        decodes = tokens == 1 and sequence.computed + 1 == sequence.total and bool(sequence.generated)
        drafts = 0
        if decodes and self.config.speculation:
            drafts = max(
                0, min(self.config.draft_tokens, budget - 1, sequence.limit - len(sequence.generated) - 1)
            )
        if not self._grow(sequence, sequence.computed + tokens + drafts):
            return 0
        self._schedule(sequence, tokens, drafts, step)
        return tokens + drafts

    def _admit(self, budget: int, step: Step) -> None:
        most = self.config.max_num_seqs
        while budget > 0 and self._waiting and len(self.running) + self._fetching_alive < most:
            sequence = self._waiting[0][1]
            if sequence.source is not None and not self._missing(sequence):
                sequence.source = None
            if sequence.alive and sequence.source is not None:
                if not self._start_fetch(sequence):
                    return
            elif sequence.alive:
                tokens = self._start(sequence, budget)
                if not tokens:
                    return  # no KV: nobody behind it may overtake
                self._waiting_alive -= 1
                insort(self.running, sequence, key=_ORDER)
                self._schedule(sequence, tokens, 0, step)
                budget -= tokens
            heapq.heappop(self._waiting)

    def _start(self, sequence: SimulatedSequence, budget: int) -> int:
        """Give a waiting request its prefix hit and KV for its first chunk. Returns the chunk; 0: no room."""
        hit = self._hit(sequence)
        tokens = min(sequence.total - len(hit) * self.config.block_size, budget)
        return tokens if self._allocate(sequence, hit, tokens) else 0

    def _start_fetch(self, sequence: SimulatedSequence) -> bool:
        """Give a request the KV into which its prompt will be fetched. Returns whether there is room."""
        missing = self._missing(sequence)
        if not self._allocate(sequence, self._hit(sequence), missing):
            return False
        self._waiting_alive -= 1
        self._fetching += 1
        self._fetching_alive += 1
        sequence.fetching = True
        self.fetches.append((sequence, missing))
        return True

    def _missing(self, sequence: SimulatedSequence) -> int:
        """Tokens worth fetching: the last is computed here, and a cached prefix is here already."""
        if sequence.request.sampling.prompt_logprobs is not None:
            return 0
        return max(sequence.total - 1 - len(self._hit(sequence)) * self.config.block_size, 0)

    def _hit(self, sequence: SimulatedSequence) -> list[int]:
        """Blocks of the longest cached prefix."""
        if not self.config.prefix_caching or sequence.request.sampling.prompt_logprobs is not None:
            return []
        size = self.config.block_size
        sequence.extend_keys(size, sequence.total)
        whole = (sequence.total - 1) // size  # at least one token must be computed, to sample after it
        return self.pool.lookup(sequence.keys[:whole])

    def _allocate(self, sequence: SimulatedSequence, hit: list[int], tokens: int) -> bool:
        """Take the blocks of a prefix hit and of `tokens` more, or none at all."""
        size = self.config.block_size
        found = len(hit) * size
        self.pool.share(hit)
        fresh = -(-(found + tokens) // size) - len(hit)
        if fresh > self.pool.free:
            self.pool.release(hit)
            return False
        sequence.blocks = hit + self.pool.take(fresh)
        sequence.computed, sequence.published = found, len(hit)
        if sequence.cached is None:
            sequence.cached = min(found, sequence.prompt_length)
        return True

    def _schedule(self, sequence: SimulatedSequence, tokens: int, drafts: int, step: Step) -> None:
        step.batch.append((sequence, tokens, drafts))
        # By the query's length, as attention kernels divide a batch (vLLM, v1/attention/backends/utils.py,
        # split_decodes_and_prefills): the last position of a fetched prompt costs what a decode costs.
        decodes = tokens == 1 and sequence.computed > 0
        if decodes and not drafts:
            step.decodes += 1
            step.decode_context += self.config.cost.attention.scanned(sequence.computed)
        else:
            work = Work(sequence.computed, 0 if decodes else tokens, drafts)
            step.others = step.others + self.config.cost.features(work)

    def _grow(self, sequence: SimulatedSequence, tokens: int) -> bool:
        """Give a running request KV for `tokens` tokens, preempting from the back; False: itself."""
        missing = -(-tokens // self.config.block_size) - len(sequence.blocks)
        while missing > self.pool.free:
            victim = self.running.pop()
            self.preemptions += 1
            self._free(victim)
            self._wait(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        return True

    def _wait(self, sequence: SimulatedSequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._waiting_alive += 1

    def _free(self, sequence: SimulatedSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.published = [], 0, 0
