"""The front doors that are compared, and one measurement of one of them."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from vllm_deepinfer.bench.gateway.processes import Child, free_port
from vllm_deepinfer.bench.gateway.upstream import Options
from vllm_deepinfer.checkpoint.tokenizer import released_tokenizer, tokenizer_files

ROUTER = "vllm-router"
ROUTER_VERSION = "0.1.17"
TOKENS = 200
PROBES = 4
PROBE_TOKENS = 4
STEP_MS = 20.0


@dataclass(frozen=True)
class Cores:
    """Which core the front door has to itself, and which everything else shares."""

    door: int
    rest: int


@dataclass(frozen=True)
class Door:
    """A running front door."""

    name: str
    port: int
    child: Child
    upstream: Child


@dataclass(frozen=True)
class Sample:
    """One measurement: CPU of the door per streamed token, and what it added to times to first token.

    Attributes: `cpu_us` µs per token; `added_ms` sorted, per probe: the client's time to the first event less
    the engine's own; `ttft_ms` sorted, the client's.
    """

    cpu_us: float
    tokens_per_s: float
    added_ms: list[float]
    ttft_ms: list[float]


class Workshop:
    """A folder with a tokenizer and logs, and the processes started in it."""

    def __init__(self, folder: Path, cores: Cores) -> None:
        self.folder = folder
        self.cores = cores
        tokenizer = released_tokenizer()
        for name, text in tokenizer_files(tokenizer, context_length=32_768).items():
            (folder / name).write_text(text, encoding="utf-8")
        self._words = _prose(tokenizer)

    def python(self, module: str, *arguments: str, core: int, log: str) -> Child:
        """A module of this package as a process."""
        command = [sys.executable, "-m", f"vllm_deepinfer.bench.gateway.{module}", *arguments]
        return Child(command, core, self.folder / f"{log}.log")

    @contextmanager
    def ours(self, *, max_busy: float = 0.0, step_ms: float = STEP_MS, seqs: int = 512) -> Iterator[Door]:
        """The gateway on an engine process."""
        path, port = str(self.folder / f"engine{free_port()}"), free_port()
        with self._upstream(path, free_port(), step_ms, seqs) as upstream, ExitStack() as stack:
            arguments = (path, str(port), str(self.folder), str(max_busy))
            child = stack.enter_context(self.python("door", *arguments, core=self.cores.door, log="door"))
            child.wait_for(f"http://127.0.0.1:{port}/health")
            yield Door("vllm-deepinfer", port, child, upstream)

    @contextmanager
    def router(self) -> Iterator[Door]:
        """vLLM's Rust router, passing the same engine's stream through. Raises: FileNotFoundError."""
        path, engine_port, port = str(self.folder / f"engine{free_port()}"), free_port(), free_port()
        command = [
            find_router(),
            "--worker-urls",
            f"http://127.0.0.1:{engine_port}",
            "--policy",
            "round_robin",
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        with self._upstream(path, engine_port, STEP_MS, 512) as upstream, ExitStack() as stack:
            child = stack.enter_context(Child(command, self.cores.door, self.folder / "router.log"))
            child.wait_for(f"http://127.0.0.1:{port}/health")
            yield Door(ROUTER, port, child, upstream)

    @contextmanager
    def load(
        self, door: Door, streams: int, tokens: int, log: str, spread_s: float, answers: int = 0
    ) -> Iterator[Child]:
        """Streams against a door, each for so many answers; 0: until told to stop."""
        arguments = (str(door.port), str(streams), str(tokens), str(spread_s), str(answers))
        with self.python("load", *arguments, core=self.cores.rest, log=log) as child:
            child.ready()
            yield child

    @contextmanager
    def _upstream(self, path: str, port: int, step_ms: float, seqs: int) -> Iterator[Child]:
        options = msgspec.json.encode(Options(step_ms, self._words, seqs)).decode()
        with self.python("upstream", path, str(port), options, core=self.cores.rest, log="upstream") as child:
            child.ready()
            yield child

    def measure(self, door: Door, streams: int, seconds: float) -> Sample:
        """CPU while `streams` streams run, then added time while PROBES more come and go beside them.

        Not both at once: the probes' answers are so short that they are two fifths of all requests.
        """
        spread = 1.0
        with self.load(door, streams, TOKENS, "load", spread) as load:
            time.sleep(spread + 0.5)
            cpu, events, began = door.child.cpu_seconds(), _events(load), time.monotonic()
            time.sleep(seconds)
            cpu = door.child.cpu_seconds() - cpu
            events, took = _events(load) - events, time.monotonic() - began
            with self.load(door, PROBES, PROBE_TOKENS, "probe", 0.1) as probe:
                time.sleep(0.5)
                probe.ask("first"), door.upstream.ask("records")
                time.sleep(seconds)
                first = json.loads(probe.ask("first"))
                load.ask("stop"), probe.ask("stop")
        records = json.loads(door.upstream.ask("records"))
        return _sample(cpu, events, took, first, records)


def _events(load: Child) -> int:
    return read_sample(load)["events"]


def read_sample(load: Child) -> dict[str, int]:
    """Totals of a load. Raises: RuntimeError if it saw errors."""
    sample: dict[str, Any] = json.loads(load.ask("sample"))
    if sample.pop("errors"):
        raise RuntimeError(f"the load saw errors: {load.ask('errors')}")
    return sample


def _prose(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """English and code of this package's corpus as tokens that are whole characters, with their texts."""
    corpus = resources.files("vllm_deepinfer.checkpoint") / "data" / "corpus.txt"
    ids: list[int] = tokenizer.encode(corpus.read_text(encoding="utf-8")).ids
    words = [(token, tokenizer.decode([token])) for token in ids]
    return [(token, text) for token, text in words if "\ufffd" not in text]


def _sample(
    cpu: float,
    events: int,
    took: float,
    first: list[tuple[str, float, float]],
    records: dict[str, list[float]],
) -> Sample:
    added, ttft = [], []
    for name, sent, got in first:
        record = records.get(name) or records.get(f"{name}-0")
        if record is not None:
            arrived, left = record
            added.append(1000 * ((got - sent) - (left - arrived)))
            ttft.append(1000 * (got - sent))
    if not (events and added):
        raise RuntimeError("no token arrived while it was measured; is the machine busy with something else?")
    return Sample(1e6 * cpu / events, events / took, sorted(added), sorted(ttft))


def quantile(values: list[float], q: float) -> float:
    """Nearest-rank quantile of sorted values."""
    return values[min(len(values) - 1, int(q * len(values)))]


def find_router() -> str:
    """Path of the router's command. Raises: FileNotFoundError with what to do."""
    beside = Path(sys.executable).with_name(ROUTER)
    found = str(beside) if beside.exists() else shutil.which(ROUTER)
    if found is None:
        raise FileNotFoundError(f"{ROUTER} is not installed; pip install {ROUTER}=={ROUTER_VERSION}")
    return found
