"""How KV reaches the decode pool, and the store that pools share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_deepinfer.policy.retention import Retention, retention_of
from vllm_deepinfer.recipes.base import Count, NotNegative, Part, Port, Positive
from vllm_deepinfer.recipes.model import Text


class Nixl(Part):
    """vLLM's NixlConnector.

    Attributes:
        buffer_device: where KV lies during a transfer, kv_buffer_device.
        backends: NIXL backends; vLLM's default is UCX.
        side_channel_host: address that peers exchange layouts on; None: the node's own.
        side_channel_base_port: of the first replica on a node; each further replica on that node (and each of
            its data-parallel ranks) takes the next. None: the application chooses free ports.
        num_threads: of the transfer; 0 on a CPU: more spin on the cores that the engines need.
        lease_s: prefilled KV that no decode worker asks for is released after this; one that waits for its
            turn renews it (vLLM's kv_lease_duration, whole seconds).
    """

    buffer_device: Literal["cpu", "cuda"] = "cuda"
    backends: tuple[Text, ...] = ("UCX",)
    side_channel_host: Text | None = None
    side_channel_base_port: Port | None = None
    num_threads: Annotated[int, Field(ge=0)] = 4
    lease_s: Annotated[int, Field(ge=1)] = 30


class Transfer(Part):
    """Attributes:
    kind: none for one aggregated pool; nixl: from engine to engine; store: through the shared store.
    nixl: options of that kind.
    timeout_s: a hand-over that takes longer is given up and the request is prefilled again.
    """

    kind: Literal["none", "nixl", "store"] = "none"
    nixl: Nixl = Nixl()
    timeout_s: Positive = 30.0


class StoreClass(Part):
    """A traffic class of the operator's own.

    Attributes:
        name: what a request says. code: 0 to 99, what an object remembers; never given to another class.
        ttl_s: seconds after its last use that a prefix is kept. share: of the capacity, 0 to 1.
    """

    name: Text
    code: Annotated[int, Field(ge=0, le=99)]
    ttl_s: Positive
    share: Annotated[NotNegative, Field(le=1)]


class Store(Part):
    """The shared prefix store.

    Attributes:
        url: an address of `store/uri.py`, such as /mnt/3fs/kv, memory:NAME or s3://BUCKET.
        capacity: what it may hold, such as 500GiB; None leaves it to expiry.
        run_tokens: tokens per object, whole blocks; None: by their bytes. Where the store hands prompts over,
            what fills no run is computed twice, and shorter prompts go to the decode pool at once.
        classes: of traffic; None: agent, chat and other. default_class: of a request that names none.
        connect_timeout_s: `check` and `serve` give up after this.
    """

    url: Text
    capacity: Text | None = None
    run_tokens: Count | None = None
    classes: tuple[StoreClass, ...] | None = None
    default_class: Text = "agent"
    connect_timeout_s: Positive = 3.0

    @property
    def retention(self) -> Retention:
        """The classes together. Raises: ValueError."""
        own = self.classes
        return retention_of(None if own is None else [one.model_dump() for one in own], self.default_class)


class Targets(Part):
    """Latency that the pools are run for, in milliseconds; None: throughput alone.

    Attributes:
        ttft_ms: to the first token. itl_ms: between two tokens, at `itl_percentile`.
    """

    ttft_ms: Positive | None = None
    itl_ms: Positive | None = None
    itl_percentile: Annotated[NotNegative, Field(gt=0, lt=100)] = 99.0
