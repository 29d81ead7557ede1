"""vLLM's CPU worker with a model runner that hands replays to the model.

Model runner V1 knows nothing of replays: a resumed request does not even carry where it starts. The scheduler
of this package sends what is missing (`message`), and the runner adds it to the model's arguments in the
method that vLLM made for that, `_model_forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from ..settings import Settings
from .host_memory import HostWindows
from .message import ReplayStep
from .sizes import Sizes
from .step_truncation import Truncations

if TYPE_CHECKING:
    from ..model.stores import PagedStore


class ReplayRunner(CPUModelRunner):
    """Made of a CPUModelRunner by `adopt`: the worker builds the runner by its name."""

    truncations: Truncations
    windows: HostWindows | None
    replays: bool

    @classmethod
    def adopt(cls, runner: Any) -> None:
        """Make a CPUModelRunner one of these."""
        settings = Settings.read(runner.vllm_config.additional_config)
        sizes = Sizes.of(runner.model_config.hf_text_config)
        replayed = runner.replays = settings.encoder_replay is True
        runner.__class__ = cls
        runner.truncations = Truncations(
            sizes.window,
            sizes.rows if settings.decoder_replay is True else None,
            sizes.lookback if replayed else 0,
        )
        runner.windows = None

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        layers = self.compilation_config.static_forward_context
        groups: dict[int, list[PagedStore]] = {
            index: [layers[name] for name in group.layer_names]
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if group.kv_cache_spec.prefix_replay_tokens
        }
        self.windows = HostWindows(groups, self.truncations.window) if groups else None

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        starts = self.truncations.starts
        for key in scheduler_output.finished_req_ids:
            starts.pop(key, None)
        step = ReplayStep.of(scheduler_output)
        if step is None and self.replays and scheduler_output.total_num_scheduled_tokens:
            raise RuntimeError("this scheduler sends no replays, so that prefix hits would lack windows")
        if step is not None:
            starts.update(step.starts)
            self._copy(step)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _copy(self, step: ReplayStep) -> None:
        for slot in step.drops:
            if self.windows is not None:
                self.windows.drop(slot)
        for copies, move in ((step.saves, "save"), (step.loads, "load")):
            for copy in copies:
                assert self.windows is not None
                getattr(self.windows, move)(copy)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        params = {key: self.requests[key].sampling_params for key in self.input_batch.req_ids}
        return super()._model_forward(
            *args,
            **kwargs,
            truncation=self.truncations.truncation(self.input_batch, params),
            lookback=self.truncations.lookback(self.input_batch),
        )


class ReplayWorker(CPUWorker):
    """vLLM's CPU worker whose runner is a `ReplayRunner`."""

    runner: ClassVar[type[ReplayRunner]] = ReplayRunner

    def init_device(self) -> None:
        super().init_device()
        self.runner.adopt(self.model_runner)
