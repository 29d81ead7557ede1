"""The engine: every draft of every prompt is verified, and what came of each is written down."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.calibration_errors import Records

from ...draft.settle import SCHEDULER
from ..saved import names_of
from .recorder import Recorder

# The scheduler has to be in this process. vLLM's warnings are about the tokenizer that it is not given.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
NO_REPLAY = {"encoder_replay": False, "decoder_replay": False}


@dataclass(frozen=True)
class Traffic:
    """What is asked.

    Attributes:
        prompts: token ids. tokens: most of an answer. temperature: of all requests.
        concurrency: requests at a time.
    """

    prompts: Sequence[Sequence[int]]
    tokens: int = 64
    temperature: float = 1.0
    concurrency: int = 32


@dataclass(frozen=True)
class Recorded:
    """Attributes:
    keys: the request of each round of verification. records: the rounds.
    target, drafter: what they are of, as a calibration file names them.
    """

    keys: list[str]
    records: Records
    target: str
    drafter: str


def record(
    model: Path, drafter: str, drafts: int, traffic: Traffic, progress: Callable[[int], None]
) -> Recorded:
    """Answer all prompts on an engine of their own.

    Args:
        drafter: a proposer's class. drafts: that it makes for a request.
        progress: called with the number of prompts that are answered.

    Raises:
        UserError: The drafter gives no confidences, or nothing was drafted.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    engine = LLM(
        str(model),
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        async_scheduling=False,
        scheduler_cls=SCHEDULER,
        max_model_len=max(map(len, traffic.prompts)) + traffic.tokens,
        max_num_seqs=traffic.concurrency,
        seed=0,
        speculative_config={"method": "custom_class", "model": drafter, "num_speculative_tokens": drafts},
        additional_config={"deepinfer": NO_REPLAY},
    ).llm_engine
    try:
        return recorded(engine, traffic, progress)
    finally:
        engine.engine_core.shutdown()


def recorded(engine: Any, traffic: Traffic, progress: Callable[[int], None]) -> Recorded:
    """The same on an in-process engine whose scheduler is an `AdaptiveVerification`."""
    scheduler = engine.engine_core.engine_core.scheduler
    recorder = scheduler.judge = Recorder(scheduler.num_spec_tokens)
    _answer(engine, traffic, progress)
    target, drafter = names_of(engine.vllm_config)
    if not recorder.rounds and recorder.unsure:
        raise UserError(
            f"{drafter.partition(':')[2]} gives no confidences with its drafts, so there is nothing to "
            "calibrate."
        )
    if not recorder.rounds:
        raise UserError("No draft was verified, because every answer ended at once: give other --prompts.")
    keys, records = recorder.records()
    return Recorded(keys, records, target, drafter)


def _answer(engine: Any, traffic: Traffic, progress: Callable[[int], None]) -> None:
    """A new request whenever one ends: few wait, so the engine's queues stay short."""
    from vllm import SamplingParams

    end = engine.vllm_config.model_config.hf_config.eos_token_id
    waiting = list(enumerate(traffic.prompts))[::-1]
    alive = done = 0
    while waiting or alive:
        while waiting and alive < traffic.concurrency:
            number, prompt = waiting.pop()
            params = SamplingParams(
                temperature=traffic.temperature,
                max_tokens=traffic.tokens,
                stop_token_ids=[end],
                seed=number,
                detokenize=False,
            )
            engine.add_request(f"calibrate-{number}", {"prompt_token_ids": list(prompt)}, params)
            alive += 1
        ended = sum(output.finished for output in engine.step())
        alive, done = alive - ended, done + ended
        if ended:
            progress(done)
