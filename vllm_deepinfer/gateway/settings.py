"""GatewaySettings: every limit of a gateway, with its default."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vllm_deepinfer.policy.retention import Retention


class GatewayLimits(BaseModel):
    """Limits and switches. Times in seconds, sizes in bytes.

    Attributes:
        thinking: whether a request that says nothing gets reasoning.
        max_body_bytes: larger requests get 413. body_timeout_s: slower ones 408.
        max_prompt_tokens: longer prompts get 400; None: the model's context decides.
        max_active: generation requests in work at once; more get 429.
        max_waiting: requests that the engine holds without a first token; more get 429.
        max_busy: new requests get 429 while the gateway's thread is busy for more than this share of the
            time, or would be with one more; a door that is saturated starves new streams while running ones
            look fine. None: off.
        min_priority: the lowest `priority` that a request may have, for keys that have no own bound; lower
            ones are served first, and 0 is what a request has that says nothing.
        max_pending_bytes: unread bytes kept for a client before it is dropped.
        write_timeout_s: how long the end of an answer waits for a client to read it.
        keepalive_s: a comment is sent when a stream has been silent for this long.
        drain_timeout_s: how long a stop waits for running requests.
        response_db: SQLite file of stored responses; None: in memory, lost on exit.
        response_ttl_s: how long a response is kept. max_responses: most kept, the oldest go first.
        public_image_hosts: hosts that image URLs may name; a leading dot allows subdomains; None: every
            public one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    thinking: bool = True
    max_body_bytes: int = Field(default=32 << 20, ge=1024)
    body_timeout_s: float = Field(default=60.0, gt=0)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_active: int = Field(default=1024, ge=1)
    max_waiting: int = Field(default=256, ge=1)
    max_busy: float | None = Field(default=None, gt=0, le=1)
    min_priority: int = 0
    max_pending_bytes: int = Field(default=4 << 20, ge=1024)
    write_timeout_s: float = Field(default=30.0, gt=0)
    keepalive_s: float = Field(default=15.0, gt=0)
    drain_timeout_s: float = Field(default=30.0, ge=0)
    response_db: Path | None = None
    response_ttl_s: float = Field(default=30 * 86400.0, gt=0)
    max_responses: int = Field(default=100_000, ge=1)
    public_image_hosts: tuple[str, ...] | None = None


class GatewaySettings(GatewayLimits):
    """The limits, and what the engines behind the gateway are.

    Attributes:
        served_names: what clients may call the model; the first is canonical.
        classes: of traffic, as the engines' prefix store has them.
    """

    served_names: tuple[str, ...] = Field(min_length=1)
    classes: Retention = Retention()
