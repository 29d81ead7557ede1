"""The drafter in the paged form under bounded replay against the rule by the letter, bit for bit.

Every page that no running request owns is NaN whenever anything is computed, so that a draft which read a row
that nobody wrote would show. DEEPINFER_REPLAY_ENGINES=1 for all lengths, chunks, taps, windows and hits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_deepinfer_plugins.draft.blocks import Drafter
from vllm_deepinfer_plugins.draft.load import load_drafter
from vllm_deepinfer_plugins.draft.sampling import Block

from tests.plugins.model.blocks import Request
from tests.plugins.model.engines import FIXTURES
from tests.plugins.model.literal import Entries, literal
from tests.plugins.model.samples import text_config, token_ids, variant
from tests.plugins.replay.oracle import ENGINES
from vllm_deepinfer.policy.replay import decoder_start, kept_rows, window_suffices

from .blocks import DraftBlocks
from .literal import drafts, features, first_row

NAME = "deepseek-v4.1-tiny-dspark"
WINDOW, COUNT = 16, 5
ROWS = kept_rows(WINDOW, COUNT)
BEHIND, MIXED, IN_FRONT = (5, 6, 7), (3, 4, 6), (2, 3, 4)
"""Tapped layers; the last KV source is layer 4, whose inputs every row has."""
BACKTRACKS = (5, 0, 3, 1, 4, 0, 2) if ENGINES else (5, 0, 3)
"""Accepted drafts, step by step."""
LONGEST = 192


@cache
def model(window: int = WINDOW, taps: tuple[int, ...] = BEHIND) -> Any:
    return variant(NAME, sliding_window=window, dspark_target_layer_ids=taps)


@cache
def drafter(window: int = WINDOW, taps: tuple[int, ...] = BEHIND) -> Drafter:
    made = Drafter(text_config(NAME, sliding_window=window, dspark_target_layer_ids=taps))
    made.load_state_dict(load_drafter(FIXTURES / NAME).state_dict())
    return made


@cache
def cached(window: int = WINDOW) -> Entries:
    """What the request whose prefixes are hit leaves in the cache."""
    return literal(model(window), token_ids(LONGEST))[1]


def blocks(
    window: int = WINDOW, taps: tuple[int, ...] = BEHIND, rows: int | None = ROWS, **settings: Any
) -> DraftBlocks:
    given = {"block_size": 16, "invariant": True, **settings}
    return DraftBlocks(model(window, taps), drafter(window, taps), rows=rows, **given)


def generate(form: DraftBlocks, request: Request, truth: torch.Tensor, accepts: Any = BACKTRACKS) -> Block:
    """Drafts behind what is computed, and after each verification of which so many drafts are right."""
    request.ids, made = torch.cat((request.ids, truth)), []
    made.append(form.draft(request))
    for accepted in accepts:
        right = request.ids[request.computed + 1 :][:accepted].tolist()
        form.verify(request, right + made[-1].tokens[0, accepted:].tolist(), accepted)
        made.append(form.draft(request))
    return Block(
        torch.cat([block.tokens for block in made]),
        torch.cat([block.confidences for block in made if block.confidences is not None]),
        None,
    )


def confidences(block: Block) -> list[list[float]]:
    assert block.confidences is not None
    found: list[list[float]] = block.confidences.tolist()
    return found


def assert_rule(found: Block, form: DraftBlocks, request: Request, prompt: int, entries: Entries) -> None:
    """Drafts behind a prompt and behind its continuation are those of the rule by the letter, to the bit."""
    taps = form.config.dspark_target_layer_ids
    anchors = [prompt]
    for accepted in BACKTRACKS[: len(found.tokens) - 1]:
        anchors.append(anchors[-1] + 1 + accepted)
    where = {"start": request.floor, "kept": request.kept}
    known = request.ids[: anchors[-1]]
    rows, _ = features(form.model, taps, known, hit=request.hit, cached=entries, **where)
    first = first_row(form.model, taps, **where)
    wanted = drafts(form.model, form.drafter, request.ids, anchors, rows, first)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.isfinite(torch.tensor(confidences(wanted))).all()
    assert confidences(found) == confidences(wanted)


# Decoder replay


CHUNKS: list[list[int]] = [[], [1, 25, 3, 60, 1], [45, 44, 1], [16] * 9]
CASES = [
    (length, chunks, taps)
    for length in (1, 15, 16, 17, 27, 28, 29, 90)
    for chunks in CHUNKS
    for taps in (BEHIND, MIXED, IN_FRONT)
]
FEW = [(90, CHUNKS[1], MIXED), (90, CHUNKS[2], BEHIND), (90, CHUNKS[3], IN_FRONT), (28, CHUNKS[0], MIXED)]
FEW += [(29, CHUNKS[1], BEHIND), (16, CHUNKS[0], BEHIND), (1, CHUNKS[0], MIXED)]


@pytest.mark.parametrize(("length", "chunks", "taps"), CASES if ENGINES else FEW)
def test_decoder_replay_is_the_rule_whatever_the_chunks(
    length: int, chunks: list[int], taps: tuple[int, ...]
) -> None:
    form = blocks(taps=taps)
    request = form.start(token_ids(length))
    for count in [*chunks, length]:
        if request.left:
            form.step((request, min(count, request.left)))
    found = generate(form, request, token_ids(40, seed=length))
    assert_rule(found, form, request, length, {})


def test_decoder_replay_bites() -> None:
    """Without it the drafts' confidences are others."""
    ids = token_ids(90)
    found = []
    for rows in (ROWS, None):
        form = blocks(rows=rows)
        request = form.start(ids)
        form.step((request, 90))
        request.ids = torch.cat((ids, ids[:1]))
        found.append(form.draft(request))
    assert confidences(found[0]) != confidences(found[1])


def test_a_window_of_rows_is_what_the_first_draft_needs_and_one_less_is_not_enough() -> None:
    for rows, whole in ((WINDOW, True), (WINDOW - 1, False)):
        form = blocks(rows=rows)
        request = form.start(token_ids(90))
        form.step((request, 90))
        request.ids = torch.cat((request.ids, token_ids(1, seed=1)))
        found = torch.tensor(confidences(form.draft(request)))
        assert bool(torch.isfinite(found).all()) is whole


def test_others_in_the_step() -> None:
    """Prompts whole, cut and ending, and requests that verify: each draft is the one that it gets alone."""
    prompts = [token_ids(length, seed=length) for length in (90, 120, 40, 33)]
    alone = []
    for ids in prompts:
        form = blocks()
        request = form.start(ids)
        form.step((request, len(ids)))
        alone.append(generate(form, request, ids[:1], accepts=()))
    form = blocks()
    a, b, c, d = map(form.start, prompts)
    form.step((b, 70), (c, 30), (d, 33))
    d.ids = torch.cat((d.ids, prompts[3][:1]))
    assert confidences(form.draft(d)) == confidences(alone[3])
    form.step((d, 1), (a, 90), (b, 10), (c, 10))
    for request, ids in ((a, prompts[0]), (c, prompts[2])):
        request.ids = torch.cat((request.ids, ids[:1]))
    both = form.draft(a, c)
    assert both.tokens.tolist() == [block.tokens[0].tolist() for block in (alone[0], alone[2])]
    assert confidences(both) == confidences(alone[0]) + confidences(alone[2])
    form.step((b, 40))
    b.ids = torch.cat((b.ids, prompts[1][:1]))
    assert confidences(form.draft(b)) == confidences(alone[1])


# Encoder replay


HITS = [(hit, suffix) for hit in (32, 48, 96, 192) for suffix in (1, 2, 30)]


@pytest.mark.parametrize(
    ("window", "taps", "hits"),
    [(window, taps, HITS) for window in (15, 16, 17) for taps in (BEHIND, MIXED, IN_FRONT)]
    if ENGINES
    else [(15, MIXED, HITS[:1]), (16, BEHIND, HITS[3:5]), (16, MIXED, HITS[-1:]), (17, IN_FRONT, HITS[2:3])],
)
def test_hits(window: int, taps: tuple[int, ...], hits: list[tuple[int, int]]) -> None:
    """Suffixes of one token and more, chunks inside the replay, floors that no block and no pair ends at."""
    rows = kept_rows(window, COUNT)
    form = blocks(window, taps, rows, replayed=True, count=400)
    base = form.start(token_ids(LONGEST))
    form.step((base, LONGEST))
    for number, (hit, suffix) in enumerate(hits):
        ids = torch.cat((token_ids(LONGEST)[:hit], token_ids(suffix, seed=hit)))
        request = form.start(ids, base, hit // 16)
        for count in [window - 1, 2] if number % 2 else [5]:
            form.step((request, min(count, request.left)))
        if request.left:
            form.step((request, request.left))
        found = generate(form, request, token_ids(40, seed=suffix))
        assert_rule(found, form, request, len(ids), cached(window))
        form.stop(request)


def test_a_hit_of_the_whole_prompt() -> None:
    """As a connector may report it: the oldest key is that of the replay's first row."""
    form = blocks(replayed=True)
    base = form.start(token_ids(LONGEST))
    form.step((base, LONGEST))
    request = form.start(token_ids(LONGEST)[:64], base, 4)
    assert request.left == WINDOW
    form.step((request, WINDOW))
    found = generate(form, request, token_ids(40, seed=1))
    assert_rule(found, form, request, 64, cached())


def test_replays_of_several_in_one_step() -> None:
    form = blocks(replayed=True, count=400)
    base = form.start(token_ids(LONGEST))
    form.step((base, LONGEST))
    prompts = [
        torch.cat((token_ids(LONGEST)[:hit], token_ids(more, seed=more))) for hit, more in ((32, 40), (96, 3))
    ]
    first, second = (form.start(ids, base, blocks) for ids, blocks in zip(prompts, (2, 6), strict=True))
    form.step((first, 10), (second, 10))
    form.step((first, 46), (second, 9))
    for request, ids in ((first, prompts[0]), (second, prompts[1])):
        request.ids = torch.cat((ids, ids[:1]))
    both = form.draft(second, first)
    for row, request in enumerate((second, first)):
        one = Block(both.tokens[row : row + 1], both.confidences[row : row + 1], None)
        assert_rule(one, form, request, request.computed, cached())


# The rule's arithmetic


@given(
    prompt=st.integers(1, 400),
    hit=st.integers(0, 400),
    window=st.integers(2, 130),
    count=st.integers(1, 8),
    generated=st.integers(0, 40),
    kept_by=st.integers(1, 400),
)
def test_no_anchor_reads_what_was_not_computed(
    prompt: int, hit: int, window: int, count: int, generated: int, kept_by: int
) -> None:
    """Behind a cold prompt, a replay, or windows out of host memory that another prompt had left there."""
    start = decoder_start(prompt, kept_rows(window, count))
    known = prompt + generated  # more than the prompt after a preemption
    anchor = known  # the first one: a step has computed all that is known
    assert start <= max(anchor - window, 0)
    if not window < hit <= known:
        return
    assert max(hit - window, start) <= anchor - window, "a replay"
    floor = decoder_start(kept_by, kept_rows(window, count))
    if hit < known and window_suffices(hit, start, window, floor) and anchor - window < hit:
        assert floor <= anchor - window, "a restored window"
