"""`vllm-deepinfer-train`: trains the small checkpoint, with a bar, and goes on where it was stopped."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.utils.deterministic
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vllm_deepinfer.errors import UserError

from . import compiled
from .loop import NotFiniteError
from .stages import STEPS, Order, quickest_dtype, train

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class TrainError(UserError):
    """A training that cannot begin or go on."""


class Precision(StrEnum):
    """What activations and products have; weights are float32 in any case."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    def chosen(self) -> torch.dtype:
        """The dtype."""
        return quickest_dtype() if self is Precision.AUTO else getattr(torch, self.value)


@app.command()
def _train(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the states and the result.")],
    seed: Annotated[int, typer.Option(help="Of weights and documents.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Steps of the backbone, 4,096 tokens each.", show_default=str(STEPS))
    ] = None,
    draft_steps: Annotated[int, typer.Option(help="Steps of the drafter.")] = 1600,
    backbone: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Train only a drafter, for this checkpoint's backbone."),
    ] = None,
    dtype: Annotated[
        Precision, typer.Option(help="Of activations and products; auto is what this machine is quick at.")
    ] = Precision.AUTO,
    processes: Annotated[int, typer.Option(help="Processes of one thread: 1, 2, 4 or 8.")] = 2,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the model's functions (needs g++).")
    ] = True,
    save_minutes: Annotated[float, typer.Option(help="Between two states.")] = 3.0,
) -> None:
    """Train a small DeepSeek-V4.1 and its DSpark drafter; OUT/checkpoint is ready to be served.

    The same OUT and options go on where a training was stopped, with the weights that it would have had.
    """
    if backbone is not None and steps is not None:
        raise TrainError("--steps is of a backbone to train, and --backbone names one: leave one of them out")
    steps = STEPS if steps is None else steps
    for option, value, least in (
        ("--seed", seed, 0),
        ("--steps", steps, 1),
        ("--draft-steps", draft_steps, 1),
    ):
        if value < least:
            raise TrainError(f"{option} is {value}: write {least} or more")
    if processes not in (1, 2, 4, 8):
        raise TrainError(f"--processes is {processes}: write 1, 2, 4 or 8, so that rows can be shared out")
    if not 0 < save_minutes < math.inf:
        raise TrainError(f"--save-minutes is {save_minutes}: write a positive number")
    order = Order(out, seed, steps, draft_steps, save_minutes * 60, dtype.chosen(), backbone)
    with _locked(out):
        print(_together(order, processes, compile_))


def _together(order: Order, processes: int, compile_: bool) -> Path:
    """Run rank 0 here and the others beside it; they end when it does, whatever it ended of."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-train-") as folder:
        meeting = f"file://{folder}/meeting"
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=_other, args=(order, number, processes, compile_, meeting), daemon=True)
            for number in range(1, processes)
        ]
        for process in others:
            process.start()
        _prepare(0, processes, compile_, meeting)
        with Progress(*_COLUMNS, console=_CONSOLE, disable=not _CONSOLE.is_terminal) as bar:
            folder_of_result = train(order, _Shown(bar))
        for process in others:
            process.join()
    return folder_of_result


class _Shown:
    """Points of the curves on a bar, or as lines where nobody watches."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, total: int, point: dict[str, float]) -> None:
        figures = " ".join(f"{name} {value:.3f}" for name, value in point.items() if name not in _PLAIN)
        figures += f", {point['speed']:,.0f} tokens/s"
        if self.bar.disable:
            print(f"{stage} {point['step']:.0f}/{total}: {figures}", file=sys.stderr, flush=True)
            return
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total, figures="")
        self.bar.update(self.tasks[stage], completed=point["step"], figures=figures)


_PLAIN = ("step", "speed")
_CONSOLE = Console(stderr=True)
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[figures]}"),
)


def _other(order: Order, number: int, processes: int, compile_: bool, meeting: str) -> None:
    _prepare(number, processes, compile_, meeting)
    with suppress(NotFiniteError, UserError, KeyboardInterrupt):  # rank 0 says it
        train(order, lambda stage, total, point: None)


def _prepare(number: int, processes: int, compile_: bool, meeting: str) -> None:
    """One thread, the same results every time, and the meeting with the other processes over loopback."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch._dynamo.config.cache_size_limit = 64
    if compile_ and not compiled.enable(True) and number == 0:
        print(
            "no C++ compiler was found, so nothing is compiled: slower by a factor of about three",
            file=sys.stderr,
        )
    if processes > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=processes)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Two trainings in one folder would overwrite each other's states."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise TrainError(f"{out} cannot be written ({error.strerror}): name a folder elsewhere") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(f"another training runs in {out}: wait for it, or name another folder") from None
        yield


def main() -> None:
    """The console script: a user's mistake is one sentence and exit code 2."""
    try:
        app(standalone_mode=False)
        sys.exit(0)
    except (UserError, NotFiniteError) as error:
        message = str(error)
    except typer.TyperException as error:  # a wrong option or argument
        message = error.format_message()
    except (KeyboardInterrupt, typer.Abort):
        print("stopped: the same command goes on with the last state", file=sys.stderr)
        sys.exit(130)
    print(f"vllm-deepinfer-train: error: {message}", file=sys.stderr)
    sys.exit(2)
