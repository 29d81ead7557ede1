"""What the connector's two halves, its peers and the engine's front end tell each other beside vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

PLEDGE = "deepinfer_pledge"
"""In `kv_transfer_params` of a hold: its number and the boards that it stands on, see `Pledge`."""
RELEASE = "deepinfer_release"
"""In `kv_transfer_params` of a request that is aborted at once: ids of holds to be released."""

RELEASED, FAILED, STUCK, EXPIRED = (
    "deepinfer_released",
    "deepinfer_failed",
    "deepinfer_stuck",
    "num_kv_expired_reqs",
)
EVENTS = (RELEASED, FAILED, STUCK)
"""Lists of request ids in the connector's stats: holds that are over, fetches that failed and are recomputed,
fetches that are overdue and cannot be stopped."""


@dataclass(frozen=True)
class Pledge:
    """A hold's number, and for each worker of its engine, by "pp:tp", the address of its board."""

    number: int
    boards: dict[str, int]

    @classmethod
    def of(cls, params: dict[str, Any]) -> Pledge | None:
        """From a hold's `kv_transfer_params`; None if it has none."""
        value = params.get(PLEDGE)
        return None if value is None else cls(value["number"], dict(value["boards"]))

    def as_params(self) -> dict[str, Any]:
        """For `kv_transfer_params`."""
        return {"number": self.number, "boards": self.boards}


@dataclass
class HandOverPayload(NixlHandshakePayload):
    """vLLM's handshake, which goes to peers as it is; the address of the board is for the own scheduler."""

    board: int = 0


class HandOverMetadata(NixlConnectorMetadata):
    """One step's news from the scheduler side to the workers.

    Attributes:
        pledges: requests whose KV will be held, with their holds' numbers.
        checks: requests that begin to fetch, with what has to stand on the other side once they are done.
        released: holds to be released.
    """

    def __init__(self, stock: NixlConnectorMetadata) -> None:
        super().__init__()
        self.__dict__.update(vars(stock))
        self.pledges: dict[str, int] = {}
        self.checks: dict[str, Pledge] = {}
        self.released: set[str] = set()


@dataclass
class HandOverStats(NixlKVConnectorStats):
    """vLLM's figures, and the events that the engine's front end acts on."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        super().reset()
        self.data.update({name: [] for name in EVENTS})

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data[name] for name in EVENTS)
