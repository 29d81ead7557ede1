"""An engine whose every answer is checked against the rule by the letter.

What a request's answer depends on is its tokens, how many of them came first, and at each admission where its
window KV begins and how much it adopted. `Log` writes that down; `check` computes the rest alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm_deepinfer_plugins.draft.settle import PROPOSER
from vllm_deepinfer_plugins.model.tiles import ROWS, RowTiles
from vllm_deepinfer_plugins.model.weights import load_backbone
from vllm_deepinfer_plugins.replay.message import ReplayStep
from vllm_deepinfer_plugins.replay.sizes import Sizes

from tests.plugins.model import engines
from tests.plugins.model.literal import Entries, literal
from tests.plugins.model.samples import tiny
from vllm_deepinfer.policy.replay import Way, decoder_start

BLOCK = 16
ENGINES = bool(os.environ.get("DEEPINFER_REPLAY_ENGINES"))
VOCAB = 1024
SPECULATION = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 5}
ON = {"batch_invariant": True, "encoder_replay": True, "decoder_replay": True, "window_tier_mib": 0}


@dataclass(frozen=True)
class Admission:
    """A request begins: how many tokens it had, what it replays, whether it gets window KV instead."""

    known: int
    floor: int
    hit: int
    restored: bool = False


class Log:
    """Writes down admissions by request, under the ids that were given to the engine."""

    def __init__(self, scheduler: Any) -> None:
        self.admissions: dict[str, list[Admission]] = defaultdict(list)
        self.loads = self.drafted = 0
        schedule = scheduler.schedule

        def logged(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            step = ReplayStep.of(output)
            assert step is not None
            self.loads += len(step.loads)
            self.drafted += bool(output.scheduled_spec_decode_tokens)
            for key, start in step.starts.items():
                entry = scheduler._ledger.find(key)
                restored = entry.way is Way.RESTORE
                admission = Admission(scheduler.requests[key].num_tokens, start.floor, start.hit, restored)
                self.admissions[key.rsplit("-", 1)[0]].append(admission)
            return output

        scheduler.schedule = logged


def checkpoint(folder: Path, blocks: int = 0) -> Path:
    """Layers: window alone; a KV source of ratio 2 with Engram; the last source, ratio 1; one behind it.

    Args:
        blocks: Of a DSpark drafter, which taps layers in front of the last source, it, and behind it.
    """
    shape = {"ratios": (0, 2, 1, 1), "kv_sources": (1, 2), "index_sources": (1, 2, 3), "engram_layers": (1,)}
    return tiny(folder, experts=4, heads=2, dspark_blocks=blocks, **shape)


@contextmanager
def engine(
    folder: Path, *, deepinfer: dict[str, Any] | None = None, blocks: int = 0, **settings: Any
) -> Iterator[Any]:
    """A V4.1 of four layers, batch-invariant, with both replays on and no window KV in host memory.

    Its hits are decided by tokens: no measured time may decide a test.

    Args:
        blocks: Of a DSpark drafter, which then drafts.
    """
    path = checkpoint(folder, blocks)
    given = {"block_size": BLOCK, "additional_config": {"deepinfer": {**ON, **(deepinfer or {})}}}
    if blocks:
        given["speculative_config"] = SPECULATION
    with engines.engine(path, **{**given, **settings}) as llm:
        scheduler_of(llm).replay_cost = lambda: None
        yield llm


def scheduler_of(llm: Any) -> Any:
    """The engine core's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@cache
def model_of(llm: Any) -> Any:
    """The plain form of an engine's model."""
    return load_backbone(Path(llm.llm_engine.model_config.model), torch.float32)


@cache
def cold_entries(llm: Any, ids: tuple[int, ...]) -> Entries:
    """What a document leaves in the prefix cache when nothing of it was there."""
    return literal(model_of(llm), torch.tensor(ids))[1]


def check(
    llm: Any,
    prompt: list[int],
    answer: list[int],
    admissions: list[Admission],
    document: list[int] | None = None,
) -> None:
    """Assert that a greedy answer is what the rule gives.

    Args:
        document: Whose cached entries the first hit adopted.
    """
    model, ids = model_of(llm), torch.tensor([*prompt, *answer])
    kept = decoder_start(len(prompt), Sizes.of(model.config).rows)
    entries = cold_entries(llm, tuple(document)) if document is not None else {}
    ends = [admission.known for admission in admissions[1:]] + [len(ids)]
    for admission, end in zip(admissions, ends, strict=True):
        # Preempted before it had an answer, it may have left entries that it adopts the next time.
        computed = max(end - 1, admission.known)
        hidden, entries = literal(
            model, ids[:computed], start=admission.floor, hit=admission.hit, kept=kept, cached=entries
        )
        hidden = hidden[: end - 1 - admission.floor]
        if end == admission.known:
            continue
        rows = hidden[admission.known - 1 - admission.floor :]
        with torch.no_grad():
            chosen = RowTiles(ROWS)(model.logits, rows).argmax(-1)
        assert chosen.tolist() == ids[admission.known : end].tolist(), (admission, admissions)
