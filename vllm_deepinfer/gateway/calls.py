"""Call: what the gateway knows about one HTTP request while it is in work."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from dataclasses import dataclass

from vllm_deepinfer.gateway.http_io import Scope, header
from vllm_deepinfer.gateway.limits.keys import ApiKey
from vllm_deepinfer.gateway.logs import access
from vllm_deepinfer.gateway.metrics import GatewayMetrics
from vllm_deepinfer.gateway.streaming.exchange import Account
from vllm_deepinfer.gateway.streaming.lane import Lane

CLIENT_LEFT = 499  # nginx's status for it
QUIET = frozenset({"/health", "/ready", "/metrics", "/status.json"})  # polled; logged with --log-level debug
_PROCESS, _COUNT = (
    secrets.token_hex(8),
    itertools.count(1),
)  # an id that only has to be unique, and costs little
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(kw_only=True)
class Call:
    """One request.

    Attributes:
        request_id: from the client's x-request-id if that is plain text, else made here; also in the answer.
        route: path template, a metric label. key: who asks; None without keys.
        status: of the answer, once known; 499 when the client left first.
        lane: a cheap way to write events, if the server has one.
    """

    request_id: str
    route: str
    account: Account
    key: ApiKey | None = None
    status: int = 0
    lane: Lane | None = None

    @classmethod
    def begin(cls, scope: Scope, route: str) -> Call:
        """A call for a request that has just arrived."""
        given = header(scope, b"x-request-id")
        if given is None or not _REQUEST_ID.fullmatch(given):
            given = f"req_{_PROCESS}{next(_COUNT):016x}"
        account = Account(received=time.monotonic())
        return cls(request_id=given, route=route, account=account, lane=Lane.open(scope))

    @property
    def tenant(self) -> str:
        """Whose stored responses and cache entries these are; empty when nobody has a key."""
        return self.key.name if self.key is not None else ""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer; Anthropic's clients read `request-id`."""
        value = self.request_id.encode("ascii")
        return [(b"x-request-id", value), (b"request-id", value)]

    def end(self, metrics: GatewayMetrics, **more: object) -> None:
        """Count and log the call."""
        now, account = time.monotonic(), self.account
        polled = self.route in QUIET
        metrics.request(self.route, self.status, now - account.received, polled)
        metrics.usage(account.prompt_tokens, account.cached_tokens, account.output_tokens)
        if not access.on or (polled and not access.polls):
            return
        ttft = None
        if account.first_token is not None:
            ttft = round((account.first_token - account.received) * 1e3, 1)
        access.write(
            {
                "request_id": self.request_id,
                "route": self.route,
                "key": self.tenant or None,
                "status": self.status,
                "ms": round((now - account.received) * 1e3, 1),
                "ttft_ms": ttft,
                "prompt_tokens": account.prompt_tokens,
                "cached_tokens": account.cached_tokens,
                "output_tokens": account.output_tokens,
                "finish": account.finish_reasons,
                **more,
            }
        )
