"""What a request says about the store.

    kv_transfer_params: {"prefix_store": {"class": "chat", "ttl_s": 86400, "load": true, "save": false}}
    vllm_xargs:         {"prefix_store_class": "chat", "prefix_store_ttl_s": 86400}

A prompt that another engine goes on with has vLLM's `do_remote_decode`; the other engine is given what this
one's last output says, `prefix_store: {"tokens": n}`: so many tokens are in the store, or about to be.

All reach the engine through `SamplingParams.extra_args`. The front door checks them and answers 400; what
still comes wrong here gets the default class, is counted, and logged once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from vllm_deepinfer.policy.retention import Choice, Retention
from vllm_deepinfer.store.stats import StoreStats

from ..hand_over.settings import STORE_KEY as KEY

logger = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Retention, and whether the request reads and writes the store.

    Attributes:
        keep: another engine goes on: everything is saved, whatever admission says.
        expected: tokens that another engine has saved or is saving.
    """

    choice: Choice
    load: bool = True
    save: bool = True
    keep: bool = False
    expected: int = 0


def options_of(request: Request, retention: Retention, stats: StoreStats) -> RequestOptions | None:
    """The options of a request; None where the store cannot serve it (adapters, prompt embeddings)."""
    if request.lora_request is not None or request.prompt_embeds is not None:
        return None
    given = _given(request)
    try:
        ttl = given.get("ttl_s")
        choice = retention.choose(given.get("class"), None if ttl is None else float(ttl))
    except (TypeError, ValueError) as error:
        stats.add("bad_request_options")
        if str(error) not in _told:
            _told.add(str(error))
            logger.warning("prefix store: %s The default class is used.", error)
        choice = retention.choose()
    expected = given.get("tokens", 0)
    return RequestOptions(
        choice,
        bool(given.get("load", True)),
        bool(given.get("save", True)),
        keep=(request.kv_transfer_params or {}).get("do_remote_decode") is True,
        expected=expected if isinstance(expected, int) else 0,
    )


def _given(request: Request) -> dict[str, Any]:
    params = request.kv_transfer_params or {}
    nested = params.get(KEY) if isinstance(params, dict) else None
    given = dict(nested) if isinstance(nested, dict) else {}
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    for name in ("class", "ttl_s"):
        if f"{KEY}_{name}" in extra:
            given.setdefault(name, extra[f"{KEY}_{name}"])
    return given
