"""What the scheduler's half tells the worker's half each step, and what comes back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vllm_deepinfer.policy.retention import Choice
from vllm_deepinfer.store.keys import Key

BlockIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RunBlocks:
    """A run and where its KV lies.

    Attributes:
        key: Its name; per shard the worker derives its own, see `shards`.
        shards: Keys of all shards of the KV, by rank; one where ranks hold the same.
        blocks: Block ids of the run per stored group, 0 where the block is not there.
    """

    shards: tuple[Key, ...]
    blocks: BlockIds


@dataclass(frozen=True)
class LoadTask:
    """Runs to load for a waiting request.

    Attributes:
        request: Its id.
        runs: In order.
        start: First token whose blocks may be written: those before belong to the engine's own cache.
    """

    request: str
    runs: tuple[RunBlocks, ...]
    start: int


@dataclass(frozen=True)
class SaveTask:
    """Runs to save; their blocks are pinned until the worker reports `job`."""

    job: int
    runs: tuple[RunBlocks, ...]
    choice: Choice


@dataclass
class StoreMetadata(KVConnectorMetadata):
    """One step's work."""

    loads: list[LoadTask] = field(default_factory=list)
    saves: list[SaveTask] = field(default_factory=list)


@dataclass
class SavesDone(KVConnectorWorkerMetadata):
    """How many ranks have finished each save."""

    jobs: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SavesDone:
        assert isinstance(other, SavesDone)
        return SavesDone(self.jobs + other.jobs)
