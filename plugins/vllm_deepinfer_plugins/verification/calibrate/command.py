"""The command: prompts in, a calibration file out, and what it is worth on prompts it was not fitted to."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_deepinfer.bench.registry import check_writable
from vllm_deepinfer.checkpoint.config import TextConfig, V41Config
from vllm_deepinfer.checkpoint.tokenizer import tokenizer_of
from vllm_deepinfer.checkpoint.trained import trained_folder
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.calibration import dumps
from vllm_deepinfer.policy.calibration_errors import Records
from vllm_deepinfer.policy.calibration_fit import LEAST_ROUNDS, Fit, cross_fit

from ...cli_errors import sentence_of
from ...draft.load import check
from ...draft.settle import PROPOSER
from .prompts import from_file, lessons
from .run import Recorded, Traffic, record


def calibrate(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The calibration, for calibration_file.")],
    model: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint (default: the trained one).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Lines {"prompt_token_ids": [5, 17]} or {"prompt": "text"} (default: held-out lessons).',
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=2, help="Lessons, without --prompts.")] = 1024,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Of all requests.")] = 1.0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")] = 32,
    drafter: Annotated[str, typer.Option(help="Class of the proposer.")] = PROPOSER,
    drafts: Annotated[
        int | None, typer.Option(min=1, help="Drafts per request (default: the checkpoint's block size).")
    ] = None,
) -> None:
    """Fit temperatures to a drafter's confidences, by what a real engine accepts.

    Every draft is verified, half of the prompts fit, the other half judges: where it is worse off, the
    calibration that is written changes nothing.
    """
    check_writable(out, "FILE")
    folder = model or trained_folder()
    text = _text_config(folder, drafter)
    positions = drafts or text.dspark_block_size
    longest = text.max_position_embeddings - tokens - positions - 1
    tokenizer = tokenizer_of(folder)
    if prompts is None:
        asked = lessons(tokenizer, count, longest)
    else:
        asked = from_file(prompts, tokenizer, text.vocab_size, longest)
    if len(asked) < 2:
        raise UserError("One prompt is not enough: one half of them fits, and the other judges.")
    recorded = _recorded(folder, drafter, positions, Traffic(asked, tokens, temperature, concurrency))
    found = judged(recorded.keys, recorded.records)
    _write(out, dumps(found.calibration, recorded.target, recorded.drafter))
    _show(found, out)


def judged(keys: Sequence[str], records: Records, seed: int = 0) -> Fit:
    """Fitted to the rounds of half of the requests, judged by those of the others.

    Args:
        keys: the request of each round.
    """
    requests = sorted(set(keys))
    random.Random(seed).shuffle(requests)
    fitting = set(requests[: len(requests) // 2])
    rows = np.array([key in fitting for key in keys])
    return cross_fit(records.where(rows), records.where(~rows))


def _text_config(folder: Path, drafter: str) -> TextConfig:
    text = V41Config.load(folder).text_config
    if drafter == PROPOSER:
        check(text)
    return text


def _recorded(folder: Path, drafter: str, drafts: int, traffic: Traffic) -> Recorded:
    """With a bar on standard error, which moves from the first answer on."""
    columns = (TextColumn("calibrate"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"))
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    with bar:
        task = bar.add_task("", total=len(traffic.prompts))
        try:
            return record(folder, drafter, drafts, traffic, lambda done: bar.update(task, completed=done))
        except Exception as error:
            sentence = sentence_of(error)  # vLLM wraps what its settings refuse
            if sentence is None:
                raise
            raise UserError(sentence) from error


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _show(found: Fit, out: Path) -> None:
    table = Table(title="Calibration error (ECE) of survival on the prompts that judged")
    for heading in ("draft", "temperature", "rounds", "before", "after"):
        table.add_column(heading, justify="right")
    temperatures = found.calibration.temperatures
    for place, (heat, before, after, rounds) in enumerate(
        zip(temperatures, found.before.survival, found.after.survival, found.after.counts, strict=True), 1
    ):
        table.add_row(str(place), f"{heat:.3f}", str(rounds), f"{before:.2%}", f"{after:.2%}")
    table.add_row("mean", "", "", f"{found.before.mean_survival:.2%}", f"{found.after.mean_survival:.2%}")
    console = Console()
    console.print(table)
    if all(heat == 1.0 for heat in temperatures):
        console.print(
            f"No temperatures were better than none (a position needs {LEAST_ROUNDS} rounds that fit), so "
            "this calibration changes nothing."
        )
    console.print(f"Written to {out}: name it as calibration_file under deepinfer in --additional-config.")
