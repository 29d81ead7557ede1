"""Copies between vLLM's paged KV and the contiguous sections of a run, layer by layer.

A section is `[layer][block][page bytes]` of one group. On a CPU the copies are plain memory copies by a
worker thread; on an accelerator they block that thread only, behind an event of the forward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from vllm_deepinfer.store.codec import Section, Sections

from .groups import StoredGroup

# Stored bytes are only read from; torch cannot know that.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class PagedKV:
    """The registered KV caches of the stored groups.

    Args:
        groups: From `groups.stored_groups`.
        caches: What vLLM registered, by layer.
        num_blocks: Blocks of the pool.
        run_tokens: Tokens per run.
    """

    def __init__(
        self,
        groups: tuple[StoredGroup, ...],
        caches: dict[str, torch.Tensor],
        num_blocks: int,
        run_tokens: int,
    ) -> None:
        self.groups, self.run_tokens = groups, run_tokens
        self._pages = [
            [
                _pages(caches[layer], num_blocks, nbytes)
                for layer, nbytes in zip(g.layers, g.page_bytes, strict=True)
            ]
            for g in groups
        ]
        self.device = self._pages[0][0].device
        self.sections: Sections = tuple(
            Section(f"{'full' if g.window is None else 'window'} {g.index}", g.nbytes(run_tokens))
            for g in groups
        )

    def gather(self, blocks: Sequence[Sequence[int]]) -> list[memoryview]:
        """The sections of a run, as new host buffers.

        Args:
            blocks: Per group the ids of the blocks to store, `StoredGroup.blocks` of them.
        """
        values = []
        for group, pages, ids in zip(self.groups, self._pages, blocks, strict=True):
            buffer = torch.empty(group.nbytes(self.run_tokens), dtype=torch.uint8)
            index, offset = torch.tensor(ids, device=self.device), 0
            for page in pages:
                nbytes = len(ids) * page.shape[1] * page.element_size()
                part = buffer[offset : offset + nbytes].view(page.dtype).view(len(ids), page.shape[1])
                if page.device.type == "cpu":
                    torch.index_select(page, 0, index, out=part)
                else:
                    part.copy_(page.index_select(0, index))
                offset += nbytes
            values.append(memoryview(buffer.numpy()))
        return values

    def scatter(
        self,
        values: Sequence[memoryview],
        blocks: Sequence[Sequence[tuple[int, int]]],
        check: Callable[[memoryview], None] = lambda piece: None,
    ) -> None:
        """Write sections into blocks.

        Args:
            values: From the store, per group.
            blocks: Per group (place in the section, block id) of each block to write.
            check: Gets every byte of `values` in order, each layer's behind its copy.
        """
        for group, pages, targets, value in zip(self.groups, self._pages, blocks, values, strict=True):
            if not targets:
                check(value)
                continue
            stored, offset = group.blocks(self.run_tokens), 0
            buffer = torch.frombuffer(value, dtype=torch.uint8)
            places = torch.tensor([place for place, _ in targets])
            index = torch.tensor([block for _, block in targets], device=self.device)
            whole = len(targets) == stored
            for page in pages:
                nbytes = stored * page.shape[1] * page.element_size()
                part = buffer[offset : offset + nbytes].view(page.dtype).view(stored, page.shape[1])
                page.index_copy_(0, index, (part if whole else part[places]).to(self.device))
                check(value[offset : offset + nbytes])
                offset += nbytes


def _pages(cache: torch.Tensor, num_blocks: int, page_bytes: int) -> torch.Tensor:
    """A layer's cache as [blocks, elements of a page], in the widest element type that fits."""
    blocks = group_kernel_blocks(cache, num_blocks)
    size = blocks.element_size()
    stride, offset = blocks.stride(0) * size, blocks.storage_offset() * size
    wide = next(
        d
        for d in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if not _rest(d, stride, offset, page_bytes)
    )
    raw = torch.tensor([], dtype=wide, device=cache.device)
    width = wide.itemsize
    return raw.set_(
        blocks.untyped_storage(), offset // width, (num_blocks, page_bytes // width), (stride // width, 1)
    )


def _rest(dtype: torch.dtype, *values: int) -> int:
    return sum(value % dtype.itemsize for value in values)
