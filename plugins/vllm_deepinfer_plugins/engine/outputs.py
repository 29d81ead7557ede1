"""From vLLM's engine-core outputs straight to token deltas, one batch per step.

AsyncLLM turns every output of a step into a RequestOutput, puts it into that request's collector and wakes
that request's task: per token and stream. Its output handler, though, hands whole steps to one object, the
OutputProcessor, and reports the step's end to it (`update_scheduler_stats`). So a subclass of that object
takes our requests out of the step, collects their deltas and delivers them at its end; nothing of vLLM is
patched, and requests that others send through `AsyncLLM.generate` keep working beside ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState

from vllm_deepinfer.engine import Sink, TokenDelta
from vllm_deepinfer.engine.delivery import Deliveries
from vllm_deepinfer_plugins.engine.entry import Entry


class StepOutputProcessor(OutputProcessor):
    """vLLM's OutputProcessor, which delivers the outputs of registered requests by step.

    Attributes:
        deliveries: counts sinks that raised.
    """

    def __init__(
        self,
        stock: OutputProcessor,
        *,
        vllm_stats: bool,
        on_step: Callable[[], None],
        on_end: Callable[[Entry], None],
        on_death: Callable[[str], None],
    ) -> None:
        """
        Args:
            stock: the processor that this one stands in for.
            vllm_stats: keep vLLM's own per-token statistics, for its `vllm:` metrics.
            on_step: called at the end of a step that brought something, before delivery.
            on_end: called for a request whose final delta is about to be delivered.
            on_death: called with a sentence when the engine has died.
        """
        super().__init__(
            stock.tokenizer,
            log_stats=stock.log_stats,
            stream_interval=stock.stream_interval,
            tracing_enabled=stock.tracing_enabled,
            admission_stats=stock.admission_stats,
        )
        self.deliveries = Deliveries()
        self._vllm_stats = vllm_stats
        self._on_step, self._on_end, self._on_death = on_step, on_end, on_death
        self._expected: dict[str, Entry] = {}
        self._entries: dict[str, Entry] = {}
        self._step: list[tuple[Sink, TokenDelta]] = []

    def expect(self, entry: Entry) -> None:
        """The next request that vLLM adds under this id is ours."""
        self._expected[entry.request.request_id] = entry

    def forget(self, entry: Entry) -> None:
        """Outputs of this request are no longer ours. Idempotent."""
        self._expected.pop(entry.request.request_id, None)
        if entry.internal_id is not None:
            self._entries.pop(entry.internal_id, None)

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        entry = self._expected.pop(request.external_req_id or "", None)
        if entry is not None:
            entry.internal_id = request.request_id
            self._entries[request.request_id] = entry

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        """One step, or a slice of a large one: ours are collected, the rest goes vLLM's way."""
        others = []
        for output in engine_core_outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                others.append(output)
                continue
            state = self.request_states[output.request_id]
            if self._vllm_stats:
                self._update_stats_from_output(state, output, engine_core_timestamp, iteration_stats)
            state.is_prefilling = False
            delta = entry.delta(output)
            if delta is not None:
                self._step.append((entry.sink, delta))
            if entry.ended:
                self._end(entry, state, output, iteration_stats)
        if not others:
            return OutputProcessorOutput([], [])
        return super().process_outputs(others, engine_core_timestamp, iteration_stats, weight_version)

    def update_scheduler_stats(self, scheduler_stats: Any) -> None:
        """The end of a step: deliver it."""
        super().update_scheduler_stats(scheduler_stats)
        if self._step:
            step, self._step = self._step, []
            self._on_step()
            self.deliveries.send(step)

    def propagate_error(self, e: Exception) -> None:
        """The output handler has failed: vLLM is dead for us."""
        # vLLM's own text for a dead process refers to a stack trace that no client of ours has seen.
        reason = "its process has ended" if isinstance(e, EngineDeadError) else str(e).split("\n")[0]
        self._on_death(f"vLLM's engine died: {reason}; the server has to be started again.")
        super().propagate_error(e)

    def _end(self, entry: Entry, state: RequestState, output: EngineCoreOutput, iteration_stats: Any) -> None:
        del self._entries[output.request_id]
        self._finish_request(state)
        if self._vllm_stats:
            self._update_stats_from_finished(state, output.finish_reason, iteration_stats)
            if self.tracing_enabled:
                self.do_tracing(output, state, iteration_stats)
        self._on_end(entry)
