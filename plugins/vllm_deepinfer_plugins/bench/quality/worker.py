"""One mode's process: `python -m ...bench.quality.worker MODE MODEL BLOCK CONTEXT EOS`, driven by pipes."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from .. import protocol
from ..worker import _end_with, _take_stdout
from .modes import MODES, arguments


class Examinee:
    """An offline vLLM that answers greedily."""

    def __init__(self, llm: Any, eos: int) -> None:
        self.llm, self.eos = llm, eos

    def answer(self, prompts: list[list[int]], most: list[int], waves: list[int]) -> dict[str, Any]:
        """Answers in the order of the prompts; a wave begins when the one before it has ended.

        Returns:
            ``ids`` and ``ended`` by prompt, ``cached``: prompt tokens that were taken from the prefix cache,
            and ``drafts``, ``accepted`` of all steps.
        """
        from vllm import SamplingParams

        order = defaultdict(list)
        for number, wave in enumerate(waves):
            order[wave].append(number)
        found: dict[int, Any] = {}
        before = self._drafted()
        cached = 0
        for _, numbers in sorted(order.items()):
            sampling = [
                SamplingParams(
                    temperature=0, max_tokens=most[at], stop_token_ids=[self.eos], detokenize=False
                )
                for at in numbers
            ]
            asked = [{"prompt_token_ids": prompts[at]} for at in numbers]
            for at, output in zip(numbers, self.llm.generate(asked, sampling, use_tqdm=False), strict=True):
                found[at] = output.outputs[0]
                cached += output.num_cached_tokens or 0
        drafts, accepted = (now - then for now, then in zip(self._drafted(), before, strict=True))
        return {
            "ids": [list(found[at].token_ids) for at in range(len(prompts))],
            "ended": [found[at].finish_reason == "stop" for at in range(len(prompts))],
            "cached": cached,
            "drafts": drafts,
            "accepted": accepted,
        }

    def _drafted(self) -> tuple[int, int]:
        """Blocks of drafts that were verified, and accepted tokens, so far."""
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        values = dict.fromkeys(names, 0)
        for metric in self.llm.get_metrics():
            if metric.name in values:
                values[metric.name] += metric.value
        return values[names[0]], values[names[1]]


def commands(examinee: Examinee) -> Mapping[str, protocol.Command]:
    """What the benchmark may ask."""
    return {"answer": examinee.answer}


def main(name: str, model: str, block: str, context: str, eos: str) -> int:
    """Serve until the benchmark closes stdin."""
    _end_with(os.getppid())
    replies = _take_stdout()
    mode = next(mode for mode in MODES if mode.name == name)
    try:
        from vllm import LLM

        llm = LLM(model=model, **arguments(mode, int(block), int(context)))
    except Exception as error:
        protocol.send(replies, {"error": f"{type(error).__name__}: {error}"})
        raise
    protocol.send(replies, {"ok": {}})
    protocol.serve(commands(Examinee(llm, int(eos))), sys.stdin, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
