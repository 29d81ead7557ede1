"""What the scheduler's half knows of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.request import Request

from vllm_deepinfer.policy.retention import Choice
from vllm_deepinfer.store.keys import Image, Key
from vllm_deepinfer.store.workers import Job

from .request_options import RequestOptions


@dataclass(slots=True)
class Tracked:
    """One request.

    Attributes:
        chains: Keys of its runs, per shard.
        found: Runs from the first on that the store has; None while nobody knows.
        saved: Runs that need no save: found, or handed to the worker.
        whole: Runs from the first on that are in the store or on their way there.
        again_at: When to look again for what another engine is writing; 0.0: it is not waited for.
        patient_until: How long it is waited for.
        offered: What `get_num_new_matched_tokens` last said: local tokens, tokens with the store's.
        loading, external: A load is under way, of that many tokens.
        give_up: A load failed: the request is computed.
    """

    request: Request
    roots: tuple[bytes, ...]
    images: tuple[Image, ...]
    options: RequestOptions
    choice: Choice
    chains: list[list[Key]] = field(default_factory=list)
    lookup: Job | None = None
    found: int | None = None
    saved: int = 0
    whole: int = 0
    again_at: float = 0.0
    patient_until: float = 0.0
    offered: tuple[int, int] = (0, 0)
    loading: bool = False
    external: int = 0
    give_up: bool = False
