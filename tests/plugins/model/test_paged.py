"""The paged form without an engine: against the plain form, and against itself in other company."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.model import paged
from vllm_deepinfer_plugins.model.whole import WholeSequences

from .blocks import Blocks
from .engines import NAMES
from .samples import assert_parity, backbone, token_ids, variant

LENGTHS = (1, 2, 7, 33, 50)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def wide() -> Any:
    """A model that selects every entry: then the rule for ties does not matter, and any chunks agree."""
    return variant(index_topk=64, candidate_topk_blocks=16)


def prompts(*lengths: int) -> list[torch.Tensor]:
    return [token_ids(length, seed=length) for length in lengths]


def whole(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states of the plain form."""
    hidden: torch.Tensor = model(ids, WholeSequences(model.config, 1, len(ids), ids.device))
    return hidden


def assert_same(model: Any, found: torch.Tensor, ids: torch.Tensor) -> None:
    """The plain form's values: hidden states but for a rounding, and its logits within the golden bounds."""
    wanted = whole(model, ids)
    assert_parity(model.logits(wanted), model.logits(found))
    same = torch.isclose(found, wanted, atol=1e-4, rtol=1e-3).all(dim=-1)
    assert same.float().mean() > 0.9, "a last bit may move a value to the next code of a cache, but seldom"


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize(("block_size", "packed"), [(16, False), (2, False), (6, True)])
def test_a_whole_prompt_in_one_chunk(name: str, block_size: int, packed: bool) -> None:
    """The selection is the plain form's, ties included, because the rows of scores are as wide."""
    model, asked = backbone(name), prompts(1, 5, 90)
    found = Blocks(model, block_size=block_size, packed=packed).run(*asked)
    for ids, hidden in zip(asked, found, strict=True):
        assert_same(model, hidden, ids)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("chunks", [[1] * 60, [3, 1, 20, 2, 1, 1], [17]])
def test_chunks(chunks: list[int], invariant: bool) -> None:
    (ids,) = prompts(45)
    (found,) = Blocks(wide(), invariant=invariant).run(ids, chunks=chunks)
    assert_same(wide(), found, ids)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("block_size", "packed", "seed"), [(4, True, 0), (2, False, 1), (16, False, 2)])
def test_chunks_and_decodes_of_several_requests(
    invariant: bool, block_size: int, packed: bool, seed: int
) -> None:
    asked = prompts(*LENGTHS)
    blocks = Blocks(wide(), block_size=block_size, packed=packed, invariant=invariant, seed=seed)
    for ids, hidden in zip(asked, blocks.run_together(*asked, largest=20, seed=seed), strict=True):
        assert_same(wide(), hidden, ids)


# Batch-invariant mode: bits, with selections that leave much out


@cache
def alone(length: int) -> torch.Tensor:
    """The reference: alone, whole, in blocks of 16."""
    return Blocks(backbone(), block_size=16, invariant=True).run(*prompts(length))[0]


@pytest.mark.parametrize(("block_size", "packed", "seed"), [(4, True, 0), (2, False, 1), (48, False, 2)])
def test_invariant_whatever_the_company(block_size: int, packed: bool, seed: int) -> None:
    asked = prompts(*LENGTHS, 90)
    blocks = Blocks(backbone(), block_size=block_size, packed=packed, invariant=True, seed=seed)
    for ids, hidden in zip(asked, blocks.run_together(*asked, largest=40, seed=seed), strict=True):
        assert torch.equal(hidden, alone(len(ids)))


@pytest.mark.parametrize("chunks", [[1] * 100, [31, 2, 33], [64]])
def test_invariant_whatever_the_chunks(chunks: list[int]) -> None:
    (found,) = Blocks(backbone(), invariant=True).run(*prompts(90), chunks=chunks)
    assert torch.equal(found, alone(90))


def test_invariant_logits_are_near_the_plain_forms() -> None:
    """With another rule for ties; where there are none to break the logits are the same."""
    (ids,) = prompts(30)
    model = variant(NAMES[1], index_topk=30)
    (found,) = Blocks(model, invariant=True).run(ids)
    assert_same(model, found, ids)


@pytest.mark.parametrize("tile", [8, 32])
def test_invariant_with_several_tiles_of_keys(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(paged, "KEY_TILE", tile)
    (ids,) = prompts(90)
    reference = Blocks(backbone(), invariant=True).run(ids)[0]
    chunked = Blocks(backbone(), invariant=True).run(ids, chunks=[5, 1, 40, 1, 1])[0]
    assert torch.equal(reference, chunked)
    torch.testing.assert_close(reference, alone(90), atol=1e-3, rtol=1e-3)


def test_invariant_prefix_hits_at_every_block() -> None:
    """The first blocks of another request, of which the windows' older ones are gone, give the same bits."""
    (ids,) = prompts(90)
    blocks = Blocks(backbone(), invariant=True, block_size=8)
    first = blocks.start(ids[:64])
    for at in range(8):
        blocks.step((first, 8))
        hit = blocks.start(ids, first, at + 1)
        blocks.step((hit, hit.left))
        assert torch.equal(torch.cat(hit.hidden), alone(90)[8 * (at + 1) :])
        blocks.stop(hit)


def test_invariant_after_preemption_and_abort() -> None:
    """A preempted request starts again in other blocks, and in the blocks of an aborted one."""
    long, other = prompts(90, 50)
    blocks = Blocks(backbone(), invariant=True, count=60)
    preempted, aborted = blocks.start(long), blocks.start(other)
    blocks.step((preempted, 37), (aborted, 11))
    blocks.step((aborted, 1), (preempted, 1))
    blocks.stop(preempted)
    blocks.stop(aborted)
    again, late = blocks.start(long), blocks.start(other)
    blocks.step((late, 20), (again, 60))
    blocks.step((again, 30), (late, 30))
    assert torch.equal(torch.cat(again.hidden), alone(90))
    assert torch.equal(torch.cat(late.hidden), alone(50))


# Ordinary mode


def test_preemption_abort_and_prefix_hit() -> None:
    (ids,) = prompts(50)
    blocks = Blocks(wide(), block_size=4)
    first, aborted = blocks.start(ids), blocks.start(ids.flip(0))
    blocks.step((aborted, 30), (first, 24))
    hit = blocks.start(ids, first, 5)
    blocks.stop(aborted)
    blocks.step((hit, 10), (first, 1))
    blocks.stop(first)
    blocks.step((hit, 20))
    again = blocks.start(ids)
    blocks.step((again, 50))
    assert_same(wide(), torch.cat(again.hidden), ids)
    torch.testing.assert_close(torch.cat(hit.hidden), again.hidden[0][20:], atol=1e-3, rtol=1e-3)


def test_pieces_that_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (ids,) = prompts(90)
    reference = Blocks(backbone()).run(ids)[0]
    monkeypatch.setattr(paged, "DENSE_ELEMENTS", 2000)
    monkeypatch.setattr(paged, "GATHER_ROWS", 3)
    torch.testing.assert_close(Blocks(backbone()).run(ids)[0], reference, atol=1e-3, rtol=1e-3)
    asked = prompts(*LENGTHS)
    for row, hidden in zip(asked, Blocks(wide()).run_together(*asked, largest=20, seed=3), strict=True):
        assert_same(wide(), hidden, row)


def test_eight_decodes_at_once() -> None:
    asked = [token_ids(20 + at, seed=at) for at in range(8)]
    blocks = Blocks(wide())
    running = [blocks.start(ids) for ids in asked]
    blocks.step(*[(request, request.left - 3) for request in running])
    for _ in range(3):
        blocks.step(*[(request, 1) for request in running])
    for request in running:
        assert_same(wide(), torch.cat(request.hidden), request.ids)


def test_bfloat16() -> None:
    """Finite whatever lies in the pages, and near the plain form: the two round at other places."""
    model, asked = backbone(NAMES[0], torch.bfloat16), prompts(1, 40, 60)
    found = Blocks(model, block_size=8).run_together(*asked, largest=20, seed=0)
    for ids, hidden in zip(asked, found, strict=True):
        likeness = torch.cosine_similarity(hidden.float(), whole(model, ids).float())
        assert float(likeness.mean()) > 0.95


def test_an_unfinished_group_leaves_no_entry() -> None:
    blocks = Blocks(backbone(), block_size=4)
    request = blocks.start(token_ids(6))
    source = blocks.stores.entries[2]  # ratio 2: two rows in a block of four tokens
    for count, written in ((3, 1), (1, 2)):
        blocks.step((request, count))
        page = source.kv_cache[request.blocks[None][0]]
        assert page.isfinite().all(dim=-1).tolist() == [row < written for row in range(2)]


def test_spans() -> None:
    span = paged.Span(request=1, start=3, count=4, begin=10)
    assert (span.end, span.rows) == (14, slice(3, 7))
