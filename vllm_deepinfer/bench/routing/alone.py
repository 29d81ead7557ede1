"""A simulated engine without a gateway: `python -m … FOLDER SIMULATED STREAMS TOKENS`.

Its CPU time per token is what a gateway with the engine in its process spends on the engine. Commands on
stdin: `tokens` prints how many it has made.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_deepinfer.bench.gateway.lines import serve_lines
from vllm_deepinfer.bench.routing.door import engine_of
from vllm_deepinfer.engine import GenerateRequest, SamplingParams, TokenDelta
from vllm_deepinfer.recipes.simulated import Simulated

PROMPT_TOKENS = 160


class Endless:
    """Streams that ask again when they have ended."""

    def __init__(self, folder: Path, simulated: Simulated, tokens: int) -> None:
        self._engine = engine_of(folder, simulated)
        self._sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self._number, self.made = 0, 0
        self._submitting: set[asyncio.Task[None]] = set()

    async def begin(self, streams: int) -> None:
        """Start the engine and the streams, evenly over a second."""
        await self._engine.start()
        for _ in range(streams):
            self._ask()
            await asyncio.sleep(1 / streams)

    def _ask(self) -> None:
        self._number += 1
        request = GenerateRequest(
            request_id=str(self._number),
            prompt_token_ids=[30] * PROMPT_TOKENS,
            sampling=self._sampling,
        )
        task = asyncio.ensure_future(self._engine.submit(request, self._sink))
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)

    def _sink(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self.made += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._ask()


async def main(folder: Path, simulated: Simulated, streams: int, tokens: int) -> None:
    """Serve commands until stdin ends."""
    endless = Endless(folder, simulated, tokens)
    await endless.begin(streams)
    await serve_lines({"tokens": lambda: str(endless.made)})


if __name__ == "__main__":
    import uvloop

    arguments = sys.argv[1:]
    parts = (Path(arguments[0]), Simulated.model_validate_json(arguments[1]))
    uvloop.run(main(*parts, int(arguments[2]), int(arguments[3])))
