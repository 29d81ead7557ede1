"""A day of traffic on the store alone, by a fake clock: what part of the prompt tokens is found.

The store is the real one (keys, stamps, retention, admission, sweeper) over a backend that keeps sizes
instead of bytes. A run is found if it was stored before by any request; whole runs count, and at least one
token of a prompt is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_deepinfer.bench.store.trace import Turn
from vllm_deepinfer.policy.admission import Admission, Rule
from vllm_deepinfer.policy.retention import Retention, TrafficClass
from vllm_deepinfer.store.base import Backend, Blob, Entry, Garbage, Item
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.stamp import Stamp
from vllm_deepinfer.store.sweeper import Sweeper

BYTES_PER_TOKEN = 890  # global KV of DeepSeek-V4.1-Flash
EPOCH = 1_800_000_000.0


class Sizes(Backend):
    """Remembers what was put, not its bytes."""

    name = "sizes"

    def __init__(self) -> None:
        self.held: dict[bytes, tuple[Key, Stamp]] = {}
        self.nbytes = 0
        self.written = 0

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [key.digest in self.held for key in keys]

    def get(self, key: Key) -> Blob | None:
        raise NotImplementedError("a replay reads no bytes")

    def put(self, item: Item) -> bool:
        key = item.key
        if key.digest in self.held:
            self.touch([key], item.stamp, hit=False)
            return False
        self.held[key.digest] = key, item.stamp
        self.nbytes += key.tokens * BYTES_PER_TOKEN
        self.written += key.tokens * BYTES_PER_TOKEN
        return True

    def touch(self, keys: Sequence[Key], stamp: Stamp, hit: bool = True) -> None:
        held = self.held
        for key in keys:
            found = held.get(key.digest)
            if found is not None:
                held[key.digest] = key, found[1].refreshed(stamp, hit)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        done = []
        for key in keys:
            found = self.held.pop(key.digest, None)
            self.nbytes -= 0 if found is None else key.tokens * BYTES_PER_TOKEN
            done.append(found is not None)
        return done

    def scan(self) -> Iterator[Entry]:
        return (Entry(key, key.tokens * BYTES_PER_TOKEN, stamp) for key, stamp in self.held.values())

    def collect(self, older_than_s: float) -> Garbage:
        return Garbage()

    def close(self) -> None:
        self.held.clear()


@dataclass(frozen=True, slots=True)
class Result:
    """What a day came to.

    Attributes:
        hit_rate: Part of the prompt tokens that was found.
        written: Bytes that were stored.
        peak: Most bytes that were held.
        removed: Runs that went before the day ended.
    """

    hit_rate: float
    written: int
    peak: int
    removed: int


class Chains:
    """Keys of a trace's prompts, made once and used by every replay."""

    def __init__(self, run_tokens: int) -> None:
        self.run_tokens = run_tokens
        self._keys: dict[tuple[int, int], list[Key]] = {}

    def of(self, turn: Turn, tokens: int) -> list[Key]:
        """Keys of the whole runs in the first `tokens` tokens of a turn's sequence."""
        run, count = self.run_tokens, tokens // self.run_tokens
        keys = self._keys.setdefault((turn.prefix, turn.shared_with), [])
        for i in range(len(keys), count):
            end = (i + 1) * run
            owner = ("shared", turn.shared_with) if end <= turn.shared else ("own", turn.prefix)
            digest = hashlib.blake2b(f"{owner} {i}".encode(), digest_size=32).digest()
            keys.append(Key(digest, keys[-1].id if keys else b"\0" * 8, i * run, run))
        return keys[:count]


def replay(
    turns: Sequence[Turn],
    chains: Chains,
    capacity: int | None,
    ttl_s: float | None = None,
    rule: Rule | None = None,
) -> Result:
    """Replay a day.

    Args:
        turns: From `trace.day`.
        chains: Their keys.
        capacity: Bytes, None for no bound.
        ttl_s: Of agents and chat alike; None keeps their defaults, three and seven days.
        rule: Admission; None stores everything.
    """
    retention = _retention(ttl_s)
    backend, admission = Sizes(), Admission(rule or Rule())
    clock = [EPOCH]
    sweeper = Sweeper(backend, capacity, retention, wall=lambda: clock[0], monotonic=lambda: clock[0])
    prompt = found = peak = removed = 0
    next_sweep = 3_600.0
    for turn in turns:
        clock[0] = EPOCH + turn.time
        if (capacity is not None and backend.nbytes > capacity) or turn.time >= next_sweep:
            removed += sum(sweeper.sweep().removed.values())
            next_sweep = turn.time + 3_600.0
        choice = retention.choose({"agent": "agent", "chat": "chat", "once": "chat"}[turn.kind])
        stamp = Stamp.new(clock[0], choice.ttl_s, choice.code)
        keys = chains.of(turn, turn.tokens)
        usable = keys[: (turn.tokens - 1) // chains.run_tokens]
        hit = _prefix(backend, usable, clock[0])
        backend.touch(usable[:hit], stamp)
        for key in usable[:hit]:
            admission.asked(key.id)
        prompt += turn.tokens
        found += hit * chains.run_tokens
        for key in chains.of(turn, turn.tokens + turn.answer)[hit:]:
            if admission.admit(key.id, choice.code, hit > 0, turn.tokens):
                backend.put(Item(key, (), stamp))
        peak = max(peak, backend.nbytes)
    return Result(found / max(1, prompt), backend.written, peak, removed)


def unbounded_hit_rate(turns: Sequence[Turn], run_tokens: int) -> float:
    """What an infinite cache finds at a run length: exact, by the length of each sequence that was seen."""
    seen: dict[tuple[str, int], int] = {}
    prompt = found = 0
    for turn in turns:
        own, shared = ("own", turn.prefix), ("shared", turn.shared_with)
        known = max(seen.get(own, 0), min(seen.get(shared, 0), turn.shared))
        found += min(known // run_tokens, (turn.tokens - 1) // run_tokens) * run_tokens
        prompt += turn.tokens
        seen[own] = max(seen.get(own, 0), (turn.tokens + turn.answer) // run_tokens * run_tokens)
        seen[shared] = max(seen.get(shared, 0), min(turn.shared, seen[own]))
    return found / max(1, prompt)


def _prefix(backend: Sizes, keys: Sequence[Key], now: float) -> int:
    """Runs from the first on that are there and alive: the sweep that drops expired ones comes later."""
    for i, key in enumerate(keys):
        held = backend.held.get(key.digest)
        if held is None or held[1].expires <= now:
            return i
    return len(keys)


def _retention(ttl_s: float | None) -> Retention:
    if ttl_s is None:
        return Retention()
    return Retention(
        tuple(TrafficClass(c.name, c.code, ttl_s, c.share) for c in Retention().classes), "agent"
    )
