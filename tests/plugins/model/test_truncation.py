"""Bounded replay in the paged forms against the rule by the letter, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.model.truncation import Truncation

from vllm_deepinfer.policy.replay import decoder_start

from .blocks import Blocks, Request
from .literal import Entries, literal
from .samples import assert_parity, token_ids, variant

WINDOW, ROWS = 128, 140
LONGEST = 640


@cache
def model(window: int = WINDOW, **changes: Any) -> Any:
    return variant(sliding_window=window, **changes)


@cache
def cached(length: int, window: int = WINDOW) -> tuple[torch.Tensor, Entries]:
    """Hidden states and entries of the request whose prefixes are hit."""
    return literal(model(window), token_ids(length))


def blocks(size: int, **settings: Any) -> Blocks:
    return Blocks(
        model(settings.pop("window", WINDOW)), **{"block_size": size, "invariant": True, **settings}
    )


def filled(form: Blocks, length: int = LONGEST) -> Request:
    """A running request that has computed ``length`` tokens."""
    request = form.start(token_ids(length))
    form.step((request, length))
    return request


def checksum(form: Blocks, request: Request) -> list[torch.Tensor]:
    """The request's entries, page by page, as they lie in memory."""
    pages = (store.kv_cache[request.blocks[None]] for store in form.stores.entries.values())
    return [page.contiguous().view(torch.uint8).clone() for page in pages]


# The values


def test_what_a_truncation_says() -> None:
    truncation = Truncation(torch.tensor([0, 40]), torch.tensor([0, 168]), torch.tensor([7, 30]))
    assert truncation.behind.tolist() == [7, 40]
    request, positions = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([5, 6, 7, 40, 41])
    kept = truncation.rows_kept(positions, request)
    assert kept is not None and kept.tolist() == [2, 3, 4]
    assert truncation.rows_kept(positions[2:], request[2:]) is None


# Decoder replay


@pytest.mark.parametrize("length", [1, 139, 140, 141, 300])
@pytest.mark.parametrize("chunks", [[], [64] * 9, [1, 100, 3, 60, 7, 1, 1, 77], [159, 1]])
def test_decoder_replay_is_the_rule_whatever_the_chunks(length: int, chunks: list[int]) -> None:
    ids = token_ids(length)
    kept = decoder_start(length, ROWS)
    wanted, _ = literal(model(), ids, kept=kept)
    found = blocks(32, rows=ROWS).run(ids, chunks=chunks)[0]
    assert torch.equal(found[kept:], wanted[kept:])
    assert not found[:kept].any(), "a row was computed for nobody"


def test_decoder_replay_changes_what_it_truncates_and_nothing_else() -> None:
    ids = token_ids(300)
    whole, entries = literal(model(), ids)
    cut, same = literal(model(), ids, kept=160)
    assert not torch.equal(whole[160:], cut[160:]), "the rule was meant to bite"
    assert all(torch.equal(entries[layer], same[layer]) for layer in entries)


@pytest.mark.parametrize("rows", [300, 10**6])
def test_with_as_many_rows_as_tokens_nothing_changes(rows: int) -> None:
    ids = token_ids(300)
    for chunks in ([], [50, 200]):
        assert torch.equal(*(blocks(16, rows=r).run(ids, chunks=chunks)[0] for r in (rows, None)))


def test_decoder_replay_beside_others_and_while_they_decode() -> None:
    """A step with a whole prompt, a chunk that ends early, a last chunk, and two requests that decode."""
    form = blocks(16, rows=20, window=16, count=400)
    prompts = [token_ids(length, seed=length) for length in (90, 200, 64, 33, 21)]
    wanted = [blocks(16, rows=20, window=16).run(ids)[0] for ids in prompts]
    a, b, c, d, e = map(form.start, prompts)
    form.step((b, 100), (c, 30), (d, 30), (e, 20))
    form.step((a, 90), (b, 60), (c, 34), (d, 1), (e, 1))
    form.step((b, 40), (d, 2))
    for request, hidden in zip((a, b, c, d, e), wanted, strict=True):
        assert torch.equal(torch.cat(request.hidden), hidden)


# Encoder replay


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_hits_of_every_block(size: int) -> None:
    """Suffixes of one token, of less than a block, of more; the literal rule gives the same bits."""
    form = blocks(size, replayed=True, rows=ROWS)
    base = filled(form)
    pages = checksum(form, base)
    for number, hit in enumerate(range(-(-(WINDOW + 1) // size) * size, 601, size)):
        suffix = (1, 2, 17, size - 1, size + 1)[number % 5]
        ids = torch.cat((token_ids(LONGEST)[:hit], token_ids(suffix, seed=hit)))
        request = form.start(ids, base, hit // size)
        for step in [WINDOW - 1, 1] if number % 2 else []:
            form.step((request, step))
        while request.left:
            form.step((request, request.left))
        assert_rule(request, hit, cached(LONGEST)[1])
        form.stop(request)
        assert all(torch.equal(*pair) for pair in zip(pages, checksum(form, base), strict=True))


def assert_rule(request: Request, hit: int, entries: Entries, window: int = WINDOW) -> None:
    start = hit - window
    wanted, _ = literal(model(window), request.ids, start=start, hit=hit, kept=request.kept, cached=entries)
    found, first = torch.cat(request.hidden), max(request.kept - start, 0)
    assert torch.equal(found[first:], wanted[first:])


@pytest.mark.parametrize("window", [15, 16, 17, 33])
def test_floors_that_no_block_and_no_pair_ends_at(window: int) -> None:
    """Odd floors split a ratio-2 pair; (W − 1) a multiple of the block is where vLLM would drop a block."""
    form = blocks(16, replayed=True, rows=window + 12, window=window)
    base = filled(form, 160)
    pages = checksum(form, base)
    for hit in (48, 64, 160):
        ids = torch.cat((token_ids(160)[:hit], token_ids(9, seed=hit)))
        request = form.start(ids, base, hit // 16)
        for count in (window - 1, 2, request.left):
            form.step((request, min(count, request.left)))
            if not request.left:
                break
        assert_rule(request, hit, cached(160, window)[1], window)
        form.stop(request)
    assert all(torch.equal(*pair) for pair in zip(pages, checksum(form, base), strict=True))


def test_a_hit_of_the_whole_prompt() -> None:
    """As a connector may report it: the last token is computed, from the replay."""
    form = blocks(32, replayed=True, rows=ROWS)
    base = filled(form)
    request = form.start(token_ids(LONGEST)[:320], base, 10)
    assert request.left == WINDOW
    form.step((request, WINDOW))
    assert_rule(request, 320, cached(LONGEST)[1])


def test_several_replays_in_one_step_and_decodes_beside_them() -> None:
    form = blocks(16, replayed=True, rows=28, window=16, count=400)
    base = filled(form, 160)
    requests = [
        form.start(torch.cat((token_ids(160)[:hit], token_ids(more, seed=more))), base, hit // 16)
        for hit, more in ((32, 40), (48, 1), (96, 30), (160, 3))
    ]
    form.step(*((request, 10) for request in requests))
    form.step(*((request, min(7, request.left)) for request in requests))
    while any(request.left for request in requests):
        form.step(*((request, min(9, request.left)) for request in requests if request.left))
    for request in requests:
        assert_rule(request, request.hit, cached(160, 16)[1], 16)


def test_a_replay_right_after_a_replay() -> None:
    """The second hit ends in what the first request computed behind its own hit."""
    form = blocks(16, replayed=True, rows=28, window=16)
    base = filled(form, 160)
    ids = torch.cat((token_ids(160)[:64], token_ids(64, seed=1)))
    first = form.start(ids, base, 4)
    form.step((first, first.left))
    _, entries = literal(model(16), ids, start=48, hit=64, kept=first.kept, cached=cached(160, 16)[1])
    second = form.start(torch.cat((ids[:112], token_ids(5, seed=2))), first, 7)
    form.step((second, second.left))
    assert_rule(second, 112, entries, 16)


def test_the_checks_can_fail() -> None:
    """Without suppressed writes pages change; without the floor what was never written comes through."""
    form = blocks(16, replayed=True, window=33)
    base = filled(form, 160)
    pages = checksum(form, base)
    request = form.start(token_ids(160)[:80], base, 5)
    request.hit = 0
    with pytest.raises(AssertionError, match="null block"):
        form.step((request, request.left))
    assert not all(torch.equal(*pair) for pair in zip(pages, checksum(form, base), strict=True))
    form = blocks(16, replayed=True, window=16)
    base = filled(form, 160)
    request = form.start(token_ids(160)[:80], base, 5)
    for store in form.stores.tokens.values():
        store.kv_cache[0] = torch.nan
    request.floor = 0
    with pytest.raises(AssertionError):
        form.step((request, request.left))


# The other arithmetics


@pytest.mark.parametrize("size", [32, 128])
def test_ordinary_float32(size: int) -> None:
    """Where scores decide nothing, sums in another order are all that differs."""
    logits = []
    everything = {"index_topk": 1024, "candidate_topk_blocks": 1024}
    for invariant in (True, False):
        form = Blocks(model(**everything), block_size=size, replayed=True, rows=ROWS, invariant=invariant)
        base = filled(form)
        ids = torch.cat((token_ids(LONGEST)[:384], token_ids(200, seed=3)))
        request = form.start(ids, base, 384 // size)
        form.step((request, 150))
        form.step((request, request.left))
        logits.append(form.model.logits(torch.cat(request.hidden)[-ROWS:]))
    with torch.no_grad():
        assert_parity(*logits)
