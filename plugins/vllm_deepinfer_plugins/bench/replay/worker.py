"""One side's process: `python -m vllm_deepinfer_plugins.bench.replay.worker SIDE MODEL`, driven by pipes."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .. import protocol
from ..cpu_share import ForeignCpu
from ..worker import _end_with, _take_stdout
from ..workload import FIRST_ORDINARY_ID, Greedy, Measurement, Workload
from .sizes import ENGINE, SETTINGS, VOCAB


class Prefixes(Workload):
    """Requests that share a long prefix with one that was served before."""

    def warm(self, prefix: int, suffix: int) -> Measurement:
        """From handing over a prompt, of which ``prefix`` tokens were served, to its first output token.

        Raises:
            RuntimeError: Less of the prefix than all but a block was cached.
        """
        known = self._known(prefix)
        if prefix not in self._primed:
            self._primed.add(prefix)
            for _ in range(2):  # the second time a window of the hit may go to host memory
                self._first_token([*known, *self.prompt(suffix)])
        prompt = [*known, *self.prompt(suffix)]
        with ForeignCpu() as foreign:
            begin = time.perf_counter()
            cached = self._first_token(prompt)
            seconds = time.perf_counter() - begin
        if cached < prefix - 128:
            raise RuntimeError(f"only {cached} of {prefix} tokens were cached")
        return Measurement(suffix, seconds, foreign.share)

    def __init__(self, engine: Any, vocab: int) -> None:
        super().__init__(engine, vocab)
        self._primed: set[int] = set()

    def _known(self, length: int) -> list[int]:
        rng = random.Random(length)
        return [rng.randrange(FIRST_ORDINARY_ID, self.vocab) for _ in range(length)]

    def _first_token(self, prompt: list[int]) -> int:
        """Serve one token of a prompt; how many tokens of it were cached."""
        from vllm import SamplingParams

        self._served += 1
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        self.engine.add_request(str(self._served), {"prompt_token_ids": prompt}, params)
        cached = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                cached = output.num_cached_tokens or 0
        return cached

    def cache(self, tokens: int) -> dict[str, Any]:
        """Bytes of the blocks that the prefix cache holds of a prompt of ``tokens`` tokens, alone in it."""
        self._forget()
        self._first_token(self.prompt(tokens))
        scheduler = self.engine.engine_core.engine_core.scheduler
        config = scheduler.kv_cache_config
        pool = scheduler.kv_cache_manager.block_pool
        blocks = sum(block.block_hash is not None for block in pool.blocks)
        size = config.kv_cache_tensors[0].size // config.num_blocks
        return {"bytes": blocks * size, "blocks": blocks, "block_bytes": size}

    def continue_greedily(self, prompt: list[int], outputs: int) -> Greedy:
        """As of `Workload`, without what is cached: a hit is allowed to change an answer."""
        self._forget()
        return super().continue_greedily(prompt, outputs)

    def _forget(self) -> None:
        if not self.engine.engine_core.engine_core.scheduler.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset")
        self._primed.clear()

    def counts(self) -> dict[str, int]:
        """What replays did so far."""
        ledger = getattr(self.engine.engine_core.engine_core.scheduler, "_ledger", None)
        return asdict(ledger.counts) if ledger is not None else {}


def commands(workload: Prefixes) -> Mapping[str, protocol.Command]:
    """What the benchmark may ask of an engine."""

    def prefill(tokens: int) -> dict[str, Any]:
        return asdict(workload.prefill(tokens))

    def warm(prefix: int, suffix: int) -> dict[str, Any]:
        return asdict(workload.warm(prefix, suffix))

    return {
        "prefill": prefill,
        "warm": warm,
        "cache": workload.cache,
        "counts": workload.counts,
        "check": workload.check,
    }


def start(side: str, model: str) -> tuple[Prefixes, dict[str, Any]]:
    """Start one side's engine on the checkpoint folder ``model``."""
    begin = time.perf_counter()
    from vllm import LLM

    engine = LLM(model=model, additional_config={"deepinfer": SETTINGS[side]}, **ENGINE).llm_engine
    return Prefixes(engine, VOCAB), {"start_seconds": round(time.perf_counter() - begin, 2)}


def main(side: str, model: str) -> int:
    """Serve until the benchmark closes stdin."""
    _end_with(os.getppid())
    replies = _take_stdout()
    try:
        workload, state = start(side, model)
    except Exception as error:
        protocol.send(replies, {"error": f"{type(error).__name__}: {error}"})
        raise
    protocol.send(replies, {"ok": state})
    protocol.serve(commands(workload), sys.stdin, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
