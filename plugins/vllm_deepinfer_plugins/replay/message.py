"""What the scheduler tells the worker with each step, beside vLLM's SchedulerOutput."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ATTRIBUTE = "deepinfer_replay"
"""SchedulerOutput is a plain dataclass: an attribute more survives in one process and over pickle."""


@dataclass(frozen=True, slots=True)
class Start:
    """A request begins, maybe anew: ``floor`` and ``hit`` as of `model.truncation.Truncation`."""

    floor: int = 0
    hit: int = 0


@dataclass(frozen=True, slots=True)
class WindowCopy:
    """Window KV between pages and host memory.

    Attributes:
        slot: in host memory.
        hit: H; the rows are those of positions [H − W, H).
        blocks: by KV-cache group of windows, the blocks from that of H − W on.
    """

    slot: int
    hit: int
    blocks: dict[int, tuple[int, ...]]


@dataclass(slots=True)
class ReplayStep:
    """One step's orders. Copies to host memory come first, in what the step before left; then loads.

    Attributes:
        starts: by request id, of those that are new in this step or resumed.
        saves, loads: copies.
        drops: slots whose host memory is given back.
    """

    starts: dict[str, Start] = field(default_factory=dict)
    saves: list[WindowCopy] = field(default_factory=list)
    loads: list[WindowCopy] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)

    def put_into(self, scheduler_output: Any) -> None:
        """Send it with a step."""
        setattr(scheduler_output, ATTRIBUTE, self)

    @staticmethod
    def of(scheduler_output: Any) -> ReplayStep | None:
        """The orders that came with a step; None: its scheduler sends none."""
        step: ReplayStep | None = getattr(scheduler_output, ATTRIBUTE, None)
        return step
