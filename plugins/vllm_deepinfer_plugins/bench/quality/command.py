"""The command: losses and drafts in the plain form, then one engine per mode that sits the same exam."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from rich.console import Console

from vllm_deepinfer.bench.report import Report
from vllm_deepinfer.checkpoint.config import TextConfig, V41Config
from vllm_deepinfer.checkpoint.tokenizer import tokenizer_of
from vllm_deepinfer.checkpoint.trained import trained_folder
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.lesson import Kind

from ..engine_process import EngineFailed, EngineProcess
from .encodings import as_released
from .exam import Answer, Question, questions, scores
from .figures import figures
from .modes import FIRST, MODES, NOT_AN_ENGINE, Mode
from .plain import Plain, measure

EXAM: Mapping[Kind, int] = {
    "tools": 36,
    "json": 36,
    "arithmetic": 60,
    "reasoning": 24,
    "copy": 24,
    "retrieval": 60,
    "chat": 48,
}
QUICK_SHARE = 6
LONG, FIRST_LONG, QUICK_LONG = 10, 4, 1
"""Lookups at each of the long lengths: in full; of the first mode with --quick; of the others then."""
SHEET = 60
TOKENS, QUICK_TOKENS = 60_000, 6_000
"""Of held-out code; a quarter of it of prose."""
ALWAYS = frozenset({"tools", "tool_calls", "arithmetic", "retrieval"})
"""Topics that every mode is asked with --quick; the first mode is asked all."""


@dataclass(frozen=True)
class Sitting:
    """What one mode's engine answered; ``reason``: why there is nothing."""

    shares: dict[str, dict[str, float | int]]
    cached: int = 0
    drafts: int = 0
    accepted: int = 0
    reason: str | None = None

    def shown(self) -> dict[str, Any]:
        """As the report shows it."""
        if self.reason is not None:
            return {"null": self.reason}
        shown: dict[str, Any] = {"topics": self.shares, "cached_prompt_tokens": self.cached}
        if self.drafts:
            shown |= {"verified_blocks": self.drafts, "tokens_per_block": 1 + self.accepted / self.drafts}
        return shown


def run(quick: bool, json: Path | None) -> int:
    """Measure, print the table, write the report."""
    progress = Console(stderr=True)

    def say(what: str) -> None:
        progress.print(f"bench quality: {what}")

    folder = trained_folder()
    text = V41Config.load(folder).text_config
    encoder = Encoder(tokenizer_of(folder))
    asked = part = questions(encoder, EXAM, FIRST_LONG if quick else LONG)
    if quick:
        part = questions(encoder, {kind: count // QUICK_SHARE for kind, count in EXAM.items()}, QUICK_LONG)
        part = [one for one in part if one.topic in ALWAYS]
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as scratch:
        folders = {"as_stored": folder}
        released: str | None = None
        try:
            folders["released"] = as_released(folder, Path(scratch) / "released")
        except UserError as error:
            released = str(error)
        plain = measure(folders, encoder, QUICK_TOKENS if quick else TOKENS, say)
        sittings = {}
        for mode in MODES:
            some = asked if mode.name == FIRST else part
            sittings[mode.name] = _sit(mode, folders, text, encoder, some, released, say)
    report = Report(
        name="quality",
        settings={
            "model": folder.name,
            "python": sys.version.split()[0],  # whose standard library the code is
            "exam": {str(kind): count for kind, count in EXAM.items()},
            "asked_of_other_modes": len(part),
            "held_out_tokens": QUICK_TOKENS if quick else TOKENS,
        },
        rounds=1,
        figures=tuple(figures(plain, sittings)),
        series=_series(plain, sittings),
    )
    report.finish(json)
    return 0


def _sit(
    mode: Mode,
    folders: Mapping[str, Path],
    text: TextConfig,
    encoder: Encoder,
    asked: Sequence[Question],
    released: str | None,
    say: Callable[[str], None],
) -> Sitting:
    """One engine's answers to all questions that its context can hold."""
    if mode.encoding not in folders:
        return Sitting({}, reason=released)
    if mode.drafts and not text.num_nextn_predict_layers:
        return Sitting({}, reason="the checkpoint has no drafter")
    fitting = [one for one in asked if len(one.prompt) + one.most <= text.max_position_embeddings]
    say(f"{mode.name}: an engine answers {len(fitting)} questions")
    command = [sys.executable, "-m", f"{__package__}.worker", mode.name, str(folders[mode.encoding])]
    command += [str(text.dspark_block_size), str(text.max_position_embeddings), str(encoder.eos)]
    try:
        with EngineProcess(mode.name, command) as engine:
            engine.wait_until_up()
            answers: list[Answer] = []
            cached = drafts = accepted = 0
            for sheet in sheets(fitting):
                found = engine.ask(
                    "answer",
                    prompts=[list(one.prompt) for one in sheet],
                    most=[one.most for one in sheet],
                    waves=[one.wave for one in sheet],
                )
                answers += map(Answer, map(tuple, found["ids"]), found["ended"])
                cached, drafts = cached + found["cached"], drafts + found["drafts"]
                accepted += found["accepted"]
                if len(fitting) > SHEET:
                    say(f"{mode.name}: {len(answers)} of {len(fitting)}")
    except EngineFailed as error:
        return Sitting({}, reason=str(error))
    shares = {topic: score.shares for topic, score in sorted(scores(encoder, fitting, answers).items())}
    return Sitting(shares, cached, drafts, accepted)


def sheets(asked: Sequence[Question]) -> list[list[Question]]:
    """So many questions at a time, a conversation whole: an engine that is slow has not failed."""
    found: list[list[Question]] = []
    for one in asked:
        if not found or (one.wave == 0 and len(found[-1]) >= SHEET):
            found.append([])
        found[-1].append(one)
    return found


def _series(plain: Plain, sittings: Mapping[str, Sitting]) -> dict[str, JsonValue]:
    modes: dict[str, Any] = {name: sitting.shown() for name, sitting in sittings.items()}
    for name, reason in NOT_AN_ENGINE.items():
        modes[name] = {"null": reason}
    for name, loss in plain.losses.items():
        kinds = {kind: round(one.bits_per_token, 4) for kind, one in loss.items()}
        modes.setdefault(name, {})["bits_per_token"] = kinds
    drafts = {
        kind: {
            "blocks": seen.blocks,
            "accepted_length": round(seen.accepted_length, 4),
            "accepted_length_greedy": round(seen.greedy_length, 4),
        }
        for kind, seen in plain.drafts.items()
    }
    replays = {kind: asdict(one) for kind, one in plain.replays.items()}
    return {"modes": modes, "drafts": drafts, "replays": replays}  # type: ignore[dict-item]
