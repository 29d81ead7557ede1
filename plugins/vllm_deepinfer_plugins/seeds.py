"""Seeded sampling on a CPU while prompts are cut into chunks.

At the end of a chunk that is not the last, vLLM 0.32's runner samples a token, throws it away, and sets the
request's random generator back by the four numbers that a draw takes on CUDA. A CPU's generator has no such
offset: the runner raises "CPU Generator does not use offset" and the engine dies of one client's ``seed``.
Here the generator's state is kept over such a draw: a seed gives the same draws however the prompt was cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def install() -> None:
    """Override two methods of vLLM's CPU runner. Idempotent."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "_sample" in vars(CPUModelRunner) or "_bookkeeping_sync" in vars(CPUModelRunner):
        return
    CPUModelRunner._sample = _sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync


def _unfinished(runner: Any) -> dict[int, Any]:
    """The generators of the requests whose sampled token is thrown away, by row."""
    rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    generators = runner.input_batch.generators
    return {int(row): generators[int(row)] for row in rows if int(row) in generators}


def _sample(self: Any, *arguments: Any, **named: Any) -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    states = {row: generator.get_state() for row, generator in _unfinished(self).items()}
    result = GPUModelRunner._sample(self, *arguments, **named)
    for row, state in states.items():
        self.input_batch.generators[row].set_state(state)
    return result


def _bookkeeping_sync(self: Any, *arguments: Any, **named: Any) -> Any:
    """vLLM's, without the generators that it would set back."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    kept = _unfinished(self)
    for row in kept:
        del self.input_batch.generators[row]
    try:
        return GPUModelRunner._bookkeeping_sync(self, *arguments, **named)
    finally:
        self.input_batch.generators.update(kept)
