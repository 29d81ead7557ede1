"""The loop of both stages: batches in order, figures now and then, a state on disk every few minutes."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.moe import MoE
from .batches import Batch, Source, batches
from .optimizer import Optimizer, Rates
from .ranks import add_up, rank, share, world
from .schedule import Schedule
from .state import Saved, restore, save

BALANCE = 1e-3
"""Step of a router's selection bias, against the load of an expert (noaux_tc)."""
EVERY = 10
"""Steps between two points of the curve."""

Report = Callable[[dict[str, float]], None]
"""Takes a point of the curve: ``step``, ``speed`` in tokens of a second, and the stage's own figures."""


class NotFiniteError(RuntimeError):
    """The loss is no number any more."""


@dataclass(frozen=True)
class Run:
    """What a stage is run with.

    Attributes:
        folder: Where states lie.
        source: Documents for a seed.
        seed: Of documents and weights.
        pad: Token that fills a row.
        dtype: What activations and products have.
        save_every: Seconds between two states.
    """

    folder: Path
    source: Source
    seed: int = 0
    pad: int = 2
    dtype: torch.dtype = torch.bfloat16
    save_every: float = 180.0


class Training(ABC):
    """A stage of the training, resumed if the folder holds a state of it.

    Args:
        model: Whose parameters are trained and saved.
        groups: ``o_groups`` of the config.
        beside: Further settings that must be the same for a training to go on.

    Raises:
        CheckpointError: The folder's state is another model's, or was begun with other settings.
    """

    NAME = ""

    def __init__(
        self,
        model: nn.Module,
        groups: int,
        run: Run,
        schedule: Schedule,
        rates: Rates,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.options, self.schedule = model, run, schedule
        self.file = run.folder / f"{self.NAME}.safetensors"
        self.optimizer = Optimizer(model.named_parameters(), groups, rates)
        self.settings = settings_of(run, schedule, rates) | dict(beside or {})
        self.step, self.seconds = 0, 0.0
        self.curve: list[dict[str, float]] = []
        if self.file.is_file():
            saved = restore(self.file, model, self.optimizer, self.settings)
            self.step, self.curve, self.seconds = saved.step, saved.curve, saved.seconds

    @abstractmethod
    def update(self, batch: Batch, whole: Batch) -> dict[str, float]:
        """One step on this process's rows of a batch.

        Args:
            whole: The batch of all processes.

        Returns:
            This process's part of each figure: the parts are added up.
        """

    def run(self, report: Report, until: int | None = None) -> None:
        """Train to the end of the schedule, or to a step, and save.

        Raises:
            NotFiniteError: A figure is no number; the last state on disk is from before.
        """
        end = min(self.schedule.steps, until or self.schedule.steps)
        begun, started = self.seconds, time.monotonic()
        last, since, saved = started, self.step, started
        options = self.options
        stream = batches(options.source, options.seed, self.step, self.schedule.shape, options.pad)
        while self.step < end:
            figures = self._update(next(stream))
            self.step += 1
            now = time.monotonic()
            self.seconds = begun + now - started
            if self.step % EVERY == 0 or self.step == end:
                self._note(figures, (self.step - since) * self.schedule.tokens / (now - last), report)
                last, since = now, self.step
            if rank() == 0 and now - saved >= options.save_every:
                self.save()
                saved = now
        if rank() == 0:
            self.save()

    def _update(self, batch: Batch) -> dict[str, float]:
        mine = Batch(share(batch.ids), share(batch.targets), share(batch.weights))
        figures = self.update(mine, batch)
        parts = torch.tensor(list(figures.values()))
        add_up([parts])
        return dict(zip(figures, parts.tolist(), strict=True))

    def _note(self, figures: dict[str, float], speed: float, report: Report) -> None:
        if rank() == 0:
            self.curve.append({"step": self.step, **figures, "speed": speed})
            report(self.curve[-1])
        if not all(map(math.isfinite, figures.values())):
            raise NotFiniteError(
                f"the loss of step {self.step} is no number: lower the rates, or take another seed"
            )

    def save(self) -> None:
        """Write the state of now."""
        self.options.folder.mkdir(parents=True, exist_ok=True)
        save(self.file, self.model, self.optimizer, Saved(self.step, self.settings, self.curve, self.seconds))

    def descend(self, loss: torch.Tensor, mixtures: Iterable[MoE], loads: list[torch.Tensor]) -> None:
        """Backward, a step of the optimiser, and a step of the routers' biases towards equal loads.

        Args:
            loss: This process's part of the sum that is to fall.
            loads: Tokens of each expert of ``mixtures``, in this process's rows.
        """
        factor = self.schedule.rate(self.step)
        self.optimizer.zero()
        loss.backward()  # type: ignore[no-untyped-call]
        values = self.optimizer.parameters.values()
        add_up([value.grad for value in values if value.grad is not None] + loads)
        self.optimizer.step(factor)
        with torch.no_grad():
            for mixture, load in zip(mixtures, loads, strict=True):
                mixture.gate.bias.add_(torch.sign(load.mean() - load), alpha=BALANCE * factor)


def settings_of(run: Run, schedule: Schedule, rates: Rates) -> dict[str, Any]:
    """What must be the same for a training to go on, as JSON has it."""
    listed = asdict(schedule) | {"lengths": [list(pair) for pair in schedule.lengths]}
    return {
        "seed": run.seed,
        "processes": world(),
        "dtype": str(run.dtype).removeprefix("torch."),
        "schedule": listed,
        "rates": asdict(rates) | {"betas": list(rates.betas)},
    }
