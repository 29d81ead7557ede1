"""Pages: gathered and scattered back, through strided layouts and partly; what of a group is stored."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.kv_connector.groups import StoredGroup, choose_run_tokens
from vllm_deepinfer_plugins.kv_connector.pages import PagedKV

from vllm_deepinfer.errors import UserError

BLOCKS, RUN = 20, 16


def test_a_run_goes_out_and_comes_back_into_other_blocks() -> None:
    """Two layers interleaved in a block, one of them in a window group: a block-outermost layout."""
    whole = torch.arange(BLOCKS * 24, dtype=torch.float32).view(BLOCKS, 24)
    full, window = whole[:, 0:16].view(BLOCKS, 1, 4, 4), whole[:, 16:24].view(BLOCKS, 1, 4, 2)
    groups = (StoredGroup(0, 4, None, ("f",), (64,)), StoredGroup(1, 4, 5, ("w",), (32,)))
    kv = PagedKV(groups, {"f": full, "w": window}, BLOCKS, RUN)
    assert [tuple(s) for s in kv.sections] == [("full 0", 256), ("window 1", 32)]
    before = whole.clone()
    values = kv.gather([(3, 1, 7, 2), (9,)])
    assert torch.equal(
        torch.frombuffer(values[0], dtype=torch.float32).view(4, 16), before[[3, 1, 7, 2], :16]
    )
    kv.scatter(values, [[(0, 10), (1, 11), (2, 12), (3, 13)], [(0, 14)]])
    assert torch.equal(whole[10:14, :16], before[[3, 1, 7, 2], :16])
    assert torch.equal(whole[14, 16:], before[9, 16:])
    untouched = [i for i in range(BLOCKS) if i not in (10, 11, 12, 13, 14)]
    assert torch.equal(whole[untouched], before[untouched])
    assert torch.equal(whole[10:14, 16:], before[10:14, 16:]), "the other group's bytes of a block stay"
    seen: list[bytes] = []
    kv.scatter(values, [[(2, 15)], []], lambda piece: seen.append(bytes(piece)))
    assert b"".join(seen) == b"".join(bytes(v) for v in values), "every byte is shown, in order"
    assert torch.equal(whole[15, :16], before[7, :16])


@pytest.mark.parametrize(
    ("window", "blocks"), [(None, 4), (1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (17, 4), (99, 4)]
)
def test_blocks_that_a_continuation_can_see(window: int | None, blocks: int) -> None:
    assert StoredGroup(0, 4, window, ("a",), (8,)).blocks(16) == blocks


def test_run_length_follows_the_bytes_per_token() -> None:
    def group(page: int, size: int = 16, window: int | None = None) -> StoredGroup:
        return StoredGroup(0, size, window, ("a",), (page,))

    assert choose_run_tokens((group(16 * 100),), None) == 512
    assert choose_run_tokens((group(16 * 10_000),), None) == 64
    assert choose_run_tokens((group(16 * 1_000_000),), None) == 16
    assert choose_run_tokens((group(16 * 100), group(9, 24, 128)), None) == 384
    assert choose_run_tokens((group(1),), 48) == 48
    with pytest.raises(UserError, match="write a multiple of 16"):
        choose_run_tokens((group(1),), 40)
