"""Runs every part and puts the figures together. A part that cannot run leaves its figures null, with the
reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import JsonValue

from vllm_deepinfer.bench.report import Figure, Report
from vllm_deepinfer.bench.store import crashes, disk, first_token, lookups, memory
from vllm_deepinfer.bench.store.replay import (
    BYTES_PER_TOKEN,
    Chains,
    Result,
    replay,
    unbounded_hit_rate,
)
from vllm_deepinfer.bench.store.trace import DAY_S, Shape, Turn, day
from vllm_deepinfer.policy.admission import Mode, Rule
from vllm_deepinfer.store.directory import DirectoryBackend
from vllm_deepinfer.store.memory import MemoryBackend

Say = Callable[[str], None]
SHM = Path("/dev/shm")
KEYS = 1_000_000
RUN_TOKENS = 512
REPLAY_RUN_TOKENS = 2_048  # a quarter of the objects of the default; both sides of the gap use it
GAP_POINTS = 2.0
TARGETS = {
    "directory_read_ratio": ("ratio", ">= 0.8"),
    "directory_write_ratio": ("ratio", ">= 0.8"),
    "memory_read_ratio": ("ratio", ">= 0.7"),
    "lookup_p99_us_memory": ("µs", "< 50"),
    "lookup_p99_ms_directory": ("ms", "< 1"),
    "warm_ttft_ratio_16k": ("ratio", "<= 0.15"),
    "crash_points_survived": ("kills", ">= 200"),
    "day_hit_rate_gap_points": ("points", "<= 2"),
}


class Parts:
    """Collects figures and series of one run."""

    def __init__(self, quick: bool, say: Say) -> None:
        self.quick, self._say = quick, say
        self.rounds = 3 if quick else 7
        self.figures: list[Figure] = []
        self.series: dict[str, JsonValue] = {}

    def run(self, title: str, names: Sequence[str], part: Callable[[], None]) -> None:
        """Run a part that adds the figures `names`; one that fails is reported with its reason."""
        self._say(title)
        before = len(self.figures)
        try:
            part()
        except (OSError, RuntimeError) as error:
            del self.figures[before:]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
            self._say(f"not measured: {reason}")
            self.figures += [Figure.missing(n, TARGETS[n][0], reason, TARGETS[n][1]) for n in names]

    def add(self, name: str, rounds: Sequence[float]) -> None:
        """A figure from its rounds."""
        self.figures.append(Figure.measured(name, rounds, *TARGETS[name]))


def report(quick: bool, say: Say = lambda text: None) -> Report:
    """Measure everything. Takes five minutes if `quick`."""
    parts = Parts(quick, say)
    with tempfile.TemporaryDirectory(prefix="vllm-deepinfer-bench-") as folder:
        place = Path(folder)
        _disk(parts, place)
        _memory(parts)
        _lookups(parts, place)
        _crashes(parts, place)
    _first_token(parts)
    _day(parts)
    settings: dict[str, JsonValue] = {
        "folder": tempfile.gettempdir(),
        "object_bytes": disk.MIB,
        "readers": disk.READERS,
        "keys": KEYS,
        "bytes_per_token": BYTES_PER_TOKEN,
        "replay_run_tokens": REPLAY_RUN_TOKENS,
        "day": asdict(_shape(quick)),
        "quick": quick,
    }
    return Report(
        name="store",
        settings=settings,
        rounds=parts.rounds,
        figures=tuple(parts.figures),
        series=parts.series,
    )


def _disk(parts: Parts, folder: Path) -> None:
    def part() -> None:
        total = (128 if parts.quick else 512) * disk.MIB
        rounds = [disk.measure(folder / "disk", total) for _ in range(parts.rounds)]
        parts.add("directory_read_ratio", [r.store_read / r.sequential_read for r in rounds])
        parts.add("directory_write_ratio", [r.store_write / r.sequential_write for r in rounds])
        parts.series["disk_mb_per_s"] = [asdict(r) for r in rounds]
        sizes = [run * BYTES_PER_TOKEN for run in (64, 128, 256, 512, 1_024, 2_048)]
        parts.series["disk_mb_per_s_by_object"] = [
            {"object_bytes": size, **asdict(disk.measure(folder / "sizes", total // size * size, size))}
            for size in sizes
        ]

    parts.run("the directory backend and a sequential copy in turn", list(TARGETS)[:2], part)


def _memory(parts: Parts) -> None:
    def part() -> None:
        with tempfile.TemporaryDirectory(prefix="vllm-deepinfer-bench-", dir=SHM) as folder:
            total = 256 * memory.MIB
            rounds = memory.measure(Path(folder) / "kv", total, parts.rounds)
            sizes = [memory.MIB * n // 2 for n in (1, 2, 4, 8, 16)]
            parts.series["memory_gb_per_s_by_object"] = [
                {"object_bytes": n, **asdict(memory.measure(Path(folder) / str(n), total, 2, n)[-1])}
                for n in sizes
            ]
        parts.add("memory_read_ratio", [r.store / r.memcpy for r in rounds])
        parts.series["memory_gb_per_s"] = [asdict(r) for r in rounds]

    parts.run("the memory backend and memcpy in turn", ["memory_read_ratio"], part)


def _lookups(parts: Parts, folder: Path) -> None:
    def part() -> None:
        count = 4_000 if parts.quick else 20_000
        with tempfile.TemporaryDirectory(prefix="vllm-deepinfer-bench-", dir=SHM) as shm:
            made = lookups.memory(Path(shm) / "keys", KEYS)
            rounds = [lookups.times(made, KEYS, count, seed) for seed in range(parts.rounds)]
            parts.add("lookup_p99_us_memory", [_quantile(r, 0.99) * 1e6 for r in rounds])
            made.close()
        on_disk = lookups.directory(folder / "keys", KEYS)
        rounds = [lookups.times(on_disk, KEYS, count, seed) for seed in range(parts.rounds)]
        parts.add("lookup_p99_ms_directory", [_quantile(r, 0.99) * 1e3 for r in rounds])
        parts.series["lookup_us_directory"] = {
            str(q): _quantile([t for r in rounds for t in r], q) * 1e6 for q in (0.5, 0.9, 0.99, 0.999)
        }
        lookups.remove(folder / "keys")

    names = ["lookup_p99_us_memory", "lookup_p99_ms_directory"]
    parts.run(f"lookups among {KEYS:,} keys", names, part)


def _crashes(parts: Parts, folder: Path) -> None:
    def part() -> None:
        random_kills = 50 if parts.quick else 200
        with tempfile.TemporaryDirectory(prefix="vllm-deepinfer-bench-", dir=SHM) as shm:
            openers: dict[str, crashes.Open] = {
                "directory": lambda: DirectoryBackend(folder / "crash"),
                "memory": lambda: MemoryBackend(Path(shm) / "crash", 256 << 20),
            }
            found = {
                name: (crashes.every_line(opener), crashes.at_random(opener, random_kills))
                for name, opener in openers.items()
            }
        broken = [line for pair in found.values() for one in pair for line in one.broken]
        if broken:
            raise RuntimeError(f"{len(broken)} kills left something wrong, the first: {broken[0]}")
        parts.add("crash_points_survived", [sum(one.survived for pair in found.values() for one in pair)])
        parts.series["crash_points"] = {
            name: {"every_line": lines.survived, "random": at_random.survived}
            for name, (lines, at_random) in found.items()
        }

    parts.run("kills at every line and at random", ["crash_points_survived"], part)


def _first_token(parts: Parts) -> None:
    def part() -> None:
        rounds = first_token.measure(2 if parts.quick else 5)
        parts.add("warm_ttft_ratio_16k", [r.warm / r.cold for r in rounds])
        parts.series["first_token_s"] = [asdict(r) for r in rounds]

    parts.run("first token of a 16k-token prompt, cold and warm", ["warm_ttft_ratio_16k"], part)


def _shape(quick: bool) -> Shape:
    return Shape(sessions=60, chats=60, one_offs=600) if quick else Shape()


def _day(parts: Parts) -> None:
    def part() -> None:
        turns = day(_shape(parts.quick))
        chains = Chains(REPLAY_RUN_TOKENS)
        infinite = replay(turns, chains, None, ttl_s=30 * DAY_S)
        fractions = (0.05, 0.1, 0.2, 0.4) if parts.quick else (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
        by_capacity = {f: replay(turns, chains, int(f * infinite.written)) for f in fractions}
        gaps = {f: 100 * (infinite.hit_rate - r.hit_rate) for f, r in by_capacity.items()}
        good = [f for f in fractions if gaps[f] <= GAP_POINTS]
        chosen = min(good) if good else max(fractions)
        parts.add("day_hit_rate_gap_points", [gaps[chosen]])
        parts.series["day"] = {
            "requests": len(turns),
            "prompt_tokens": sum(turn.tokens for turn in turns),
            "infinite": asdict(infinite),
            "recommended_capacity_bytes": int(chosen * infinite.written),
            "recommended_fraction_of_a_days_new_kv": chosen,
        }
        parts.series["day_by_capacity"] = [
            {"fraction": f, "capacity_bytes": int(f * infinite.written), "gap_points": gaps[f], **asdict(r)}
            for f, r in by_capacity.items()
        ]
        _day_tables(parts, chains, turns, infinite, chosen)

    parts.run("24 hours of AgentX-shaped traffic by a fake clock", ["day_hit_rate_gap_points"], part)


def _day_tables(parts: Parts, chains: Chains, turns: list[Turn], infinite: Result, chosen: float) -> None:
    """Hit rate over time to live and capacity, admission modes, and run lengths."""
    hours = (1, 24) if parts.quick else (0.25, 1, 6, 24, 72)
    capacities = {"recommended": int(chosen * infinite.written), "unbounded": None}
    parts.series["day_by_ttl_hours"] = [
        {"ttl_hours": h, "capacity": name, **asdict(replay(turns, chains, capacity, ttl_s=h * 3_600))}
        for h in hours
        for name, capacity in capacities.items()
    ]
    parts.series["day_by_admission"] = [
        {
            "mode": str(mode),
            "min_tokens": least,
            **asdict(replay(turns, chains, capacities["recommended"], rule=Rule(mode, least))),
        }
        for mode in Mode
        for least in ((0,) if parts.quick else (0, 4_096))
    ]
    parts.series["day_by_run_tokens"] = [
        {"run_tokens": run, "hit_rate": unbounded_hit_rate(turns, run)}
        for run in (128, 256, 512, 1_024, 2_048, 4_096)
    ]


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
