"""What vLLM's block manager and model runner do around the model, by hand and meaner than they are.

Blocks are handed out in random order. Before each step every page that no running request owns is filled
with NaN, and so are new pages: what the model reads without having written it shows. Blocks behind a sliding
window go back to the pool, as in vLLM; with bounded replay, a hit adopts the entries' blocks alone. The null
block 0 stays zero, and nothing is written between the pages of a packed layout.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm_deepinfer_plugins.model.causal_lm import make_stores
from vllm_deepinfer_plugins.model.paged import PagedSequence, Stores
from vllm_deepinfer_plugins.model.stores import Hits, PagedMetadata, PagedStore
from vllm_deepinfer_plugins.model.tiles import ROWS, RowTiles
from vllm_deepinfer_plugins.model.truncation import Truncation

from vllm_deepinfer.policy.replay import decoder_start

Group = int | None  # stores of one window share their blocks; None is the group of the entries
GARBAGE = {torch.int32: 2**31 - 1}


@dataclass(eq=False)
class Request:
    """A running request: its ids, how many of them are computed, and its blocks of each group.

    ``floor``, ``hit`` and ``kept`` are what `Truncation` has of it.
    """

    ids: torch.Tensor
    computed: int = 0
    blocks: dict[Group, list[int]] = field(default_factory=dict)
    hidden: list[torch.Tensor] = field(default_factory=list)
    floor: int = 0
    hit: int = 0
    kept: int = 0

    @property
    def left(self) -> int:
        return len(self.ids) - self.computed


class Blocks:
    """A model over paged stores, stepped by hand.

    Args:
        model: The backbone.
        block_size: Tokens per block.
        invariant: Batch-invariant mode.
        packed: Whether a block of each store is followed by bytes that belong to somebody else.
        count: Blocks of each group's pool.
        sequence: Makes the step's sequence; `PagedSequence`'s arguments.
        replayed: Bounded replay after a hit.
        rows: Rows of a prompt that go behind the last KV source; None for all.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_size: int = 4,
        invariant: bool = False,
        packed: bool = False,
        count: int = 200,
        seed: int = 0,
        sequence: Callable[..., PagedSequence] = PagedSequence,
        replayed: bool = False,
        rows: int | None = None,
    ) -> None:
        self.sequence, self.replayed, self.rows = sequence, replayed, rows
        self.model, self.config, self.block_size = model, model.config, block_size
        self.tiles = RowTiles(ROWS if invariant else None)
        vllm_config: Any = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=block_size),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        self.stores = self._make_stores(vllm_config)
        self.all = [*self.stores.tokens.values(), *self.stores.entries.values()]
        self.random, self.requests = random.Random(seed), list[Request]()
        self.free: dict[Group, list[int]] = {}
        self.gaps: list[torch.Tensor] = []
        for store in self.all:
            self.free[group_of(store)] = self.random.sample(range(1, count), count - 1)
            self._allocate(store, count, gap=3 if packed else 0)

    def _make_stores(self, vllm_config: Any) -> Stores:
        return make_stores(vllm_config, self.config, replayed=self.replayed)

    def _allocate(self, store: PagedStore, count: int, gap: int) -> None:
        rows = self.block_size // store.ratio
        raw = torch.zeros(count, 1, rows + gap, store.channels, dtype=store.dtype)
        raw[:, :, rows:] = garbage(store.dtype)
        store.bind_kv_cache(raw[:, :, :rows])
        self.gaps.append(raw[:, :, rows:])

    # Block manager

    def start(self, ids: torch.Tensor, prefix_of: Request | None = None, blocks: int = 0) -> Request:
        """A new request; its first whole ``blocks`` may be those of another one, as at a prefix hit."""
        request = Request(ids, blocks * self.block_size, {group: [] for group in self.free})
        request.kept = 0 if self.rows is None else decoder_start(len(ids), self.rows)
        if self.replayed and blocks:
            assert prefix_of is not None
            return self._replay(request, prefix_of, blocks)
        for group, table in prefix_of.blocks.items() if prefix_of is not None else ():
            shared = table[:blocks]
            needed = self._first_needed(group, request.computed)
            request.blocks[group] = [0 if at < needed else block for at, block in enumerate(shared)]
            assert all(block for block in request.blocks[group][needed:]), "the prefix is not cached any more"
        self.requests.append(request)
        return request

    def _replay(self, request: Request, prefix_of: Request, blocks: int) -> Request:
        request.hit = blocks * self.block_size
        request.floor = request.computed = request.hit - self.config.sliding_window
        assert request.floor > 0, "a hit of one window is not adopted"
        for group in request.blocks:
            needed = self._first_needed(group, request.hit)
            fresh = [self.free[group].pop() for _ in range(blocks - needed)] if group is not None else []
            shared = prefix_of.blocks[group][:blocks]
            request.blocks[group] = shared if group is None else [0] * needed + fresh
        self.requests.append(request)
        return request

    def stop(self, request: Request) -> None:
        """Forget a finished, aborted or preempted request: its blocks may be another's at once."""
        self.requests.remove(request)
        for group, table in request.blocks.items():
            still = {block for other in self.requests for block in other.blocks[group]}
            self.free[group] += [block for block in table if block and block not in still]
            self.random.shuffle(self.free[group])

    def _first_needed(self, group: Group, computed: int) -> int:
        return 0 if group is None else max(computed - group + 1, 0) // self.block_size

    def _grow(self, request: Request, count: int) -> None:
        for group, table in request.blocks.items():
            for at in range(min(self._first_needed(group, request.computed), len(table))):
                block, table[at] = table[at], 0
                if block and not any(block in other.blocks[group] for other in self.requests):
                    self.free[group].append(block)
            while len(table) * self.block_size < request.computed + count:
                table.append(self.free[group].pop())

    def _poison(self) -> None:
        """Garbage into every page of a block that nobody owns; blocks handed out later start with it."""
        for store in self.all:
            free = torch.tensor(self.free[group_of(store)])
            store.kv_cache[free] = garbage(store.dtype)

    # Model runner

    @torch.no_grad()
    def step(self, *parts: tuple[Request, int]) -> None:
        """One forward pass over the next ``count`` tokens of each request."""
        self._poison()
        for request, count in parts:
            assert 0 < count <= request.left
            self._grow(request, count)
        ids = torch.cat([request.ids[request.computed :][:count] for request, count in parts])
        positions = torch.cat([torch.arange(request.computed, request.computed + n) for request, n in parts])
        step = (self._metadata(parts), self._truncation(parts), self._lookback(parts))
        sequence = self.sequence(self.config, positions, self.tiles, self.stores, *step)
        hidden = self.model(ids, sequence)
        assert torch.isfinite(hidden).all()
        for (request, count), rows in zip(parts, hidden.split([count for _, count in parts]), strict=True):
            request.computed += count
            request.hidden.append(rows)
        for store, gap in zip(self.all, self.gaps, strict=True):
            assert not store.kv_cache[0].any(), "the null block was written"
            assert gap.isnan().all() if gap.is_floating_point() else (gap == GARBAGE[gap.dtype]).all()

    def _truncation(self, parts: tuple[tuple[Request, int], ...]) -> Truncation | None:
        if not self.replayed and self.rows is None:
            return None
        requests = [request for request, _ in parts]
        return Truncation(
            torch.tensor([request.floor for request in requests]),
            torch.tensor([request.hit for request in requests]),
            torch.tensor([request.kept for request in requests]),
        )

    def _lookback(self, parts: tuple[tuple[Request, int], ...]) -> torch.Tensor | None:
        if not self.replayed:
            return None
        depth = max(self.config.engram_max_ngram_size - 1, 1)
        padded = [torch.cat((torch.full((depth,), -1), request.ids)) for request, _ in parts]
        return torch.stack([ids[r.computed :][:depth] for ids, (r, _) in zip(padded, parts, strict=True)])

    def _metadata(self, parts: tuple[tuple[Request, int], ...]) -> dict[str, PagedMetadata]:
        counts = torch.tensor([count for _, count in parts])
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
        lengths = torch.tensor([request.computed + count for request, count in parts], dtype=torch.int32)
        metadata = {}
        for store in self.all:
            tables = [request.blocks[group_of(store)] for request, _ in parts]
            # Rows of a block table are as long as the longest, and hold what was there before.
            width = max(map(len, tables)) + 1
            table = torch.tensor([row + [10**6] * (width - len(row)) for row in tables], dtype=torch.int32)
            slots = [
                row[at // self.block_size] * self.block_size + at % self.block_size
                for (request, count), row in zip(parts, tables, strict=True)
                for at in range(request.computed, request.computed + count)
            ]
            metadata[store.prefix] = PagedMetadata(
                table, torch.tensor(slots + [-1] * 3), starts, lengths, int(counts.sum())
            )
        return metadata

    def run(self, *prompts: torch.Tensor, chunks: list[int] | None = None) -> list[torch.Tensor]:
        """Hidden states of prompts, one after another, each in the given chunks (the last takes the rest)."""
        results = []
        for ids in prompts:
            request = self.start(ids)
            for count in chunks or []:
                if request.left > count:
                    self.step((request, count))
            while request.left:
                self.step((request, request.left))
            self.stop(request)
            results.append(torch.cat(request.hidden))
        return results

    def run_together(self, *prompts: torch.Tensor, largest: int, seed: int) -> list[torch.Tensor]:
        """Hidden states of prompts that arrive at random times; random chunks, often single tokens."""
        rng, waiting = random.Random(seed), [Request(ids) for ids in prompts]
        order, running = list(range(len(prompts))), dict[int, Request]()
        rng.shuffle(order)
        while order or running:
            if order and (not running or rng.random() < 0.5):
                at = order.pop()
                running[at] = waiting[at] = self.start(prompts[at])
            parts = [
                (request, min(request.left, rng.choice([1, 1, rng.randint(1, largest)])))
                for request in rng.sample(list(running.values()), len(running))
                if rng.random() < 0.8
            ]
            if parts:
                self.step(*parts)
            for at in [at for at, request in running.items() if not request.left]:
                self.stop(running.pop(at))
        return [torch.cat(request.hidden) for request in waiting]


def group_of(store: PagedStore) -> Group:
    """Stores of one group share block tables: vLLM's, which goes by the window that a spec asks for."""
    return None if store.window is None else store.window + (store.hits is Hits.REPLAYED)


def garbage(dtype: torch.dtype) -> float:
    """NaN, or an id that no vocabulary has."""
    return GARBAGE.get(dtype, float("nan"))
