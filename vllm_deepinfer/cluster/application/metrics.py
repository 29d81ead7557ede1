"""One metrics endpoint for the whole application, with the labels pool, role, replica and gateway.

Gateways are asked over HTTP, replicas by a Serve broadcast, scaling decisions are read from Ray. Replicas are
numbered: the lowest free number goes to a new one, so that no label grows without bound.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from vllm_deepinfer.recipes.schema import Recipe

from . import decisions

logger = logging.getLogger(__name__)
GAUGES = {
    "active_requests": "Requests that the replica has accepted and that have not ended.",
    "waiting_requests": "Of these, requests without KV.",
    "queued_prompt_tokens": "Prompt tokens of requests that have not produced a token.",
    "held_requests": "Prefilled requests whose KV waits for a decode worker.",
    "kv_tokens_used": "KV in use, in tokens.",
    "kv_tokens_free": "KV that is free, in tokens.",
    "leases": "Serve calls that wait for the end of their requests.",
    "ready": "Whether the engine is ready: 1 or 0.",
}
COUNTERS = {
    "steps": "Engine steps that have delivered something.",
    "sink_failures": "Deliveries that were lost because their receiver raised.",
    "dropped_sessions": "Gateways whose requests were aborted because they fell silent or did not read.",
    "bad_messages": "Messages on the token channel that were none of ours.",
    "unclaimed_leases": "Serve calls whose request did not come.",
}


class Numbers:
    """The lowest free number for each name that is present."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, names: Iterable[str]) -> dict[str, int]:
        """Numbers of these names; those of names that are not among them are free again."""
        present = sorted(names)
        self._numbers = {name: number for name, number in self._numbers.items() if name in present}
        for name in present:
            if name not in self._numbers:
                taken = set(self._numbers.values())
                self._numbers[name] = next(number for number in range(len(taken) + 1) if number not in taken)
        return dict(self._numbers)


class ApplicationMetrics:
    """Gathers the metrics of one application.

    Args:
        recipe: of the application.
        handles: Serve's handles to the pools, by name.
        gateways: the gateways' addresses, read at each call; it may change.
    """

    def __init__(self, recipe: Recipe, handles: Mapping[str, Any], gateways: list[str]) -> None:
        self._recipe, self._handles, self._gateways = recipe, handles, gateways
        self._numbers = {name: Numbers() for name in recipe.pools}
        self._unreachable = 0

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        families: dict[str, Metric] = {}
        for name in self._handles:
            self._pool(families, name)
        for address in list(self._gateways):
            self._gateway(families, address)
        _add(
            families,
            "deepinfer_scrape_failures",
            "counter",
            "Processes that did not answer.",
            self._unreachable,
        )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Fixed(list(families.values())))
        return generate_latest(registry)

    def _pool(self, families: dict[str, Metric], name: str) -> None:
        labels = {"pool": name, "role": self._recipe.pools[name].role}
        record = decisions.read(self._recipe.name, name)
        if record is not None:
            _add(
                families, "deepinfer_pool_target_replicas", "gauge", "Replicas wanted.", record.target, labels
            )
            for direction, count in (("up", record.ups), ("down", record.downs)):
                _add(
                    families,
                    "deepinfer_pool_scaling_decisions",
                    "counter",
                    "Decisions to change the number of replicas.",
                    count,
                    {**labels, "direction": direction},
                )
        try:
            answers: list[dict[str, Any]] = self._handles[name].broadcast("measures").results(timeout_s=5)
        except Exception as error:
            self._failed(f"pool {name}", error)
            answers = []
        found = {answer["replica"]: answer for answer in answers if isinstance(answer, dict)}
        _add(families, "deepinfer_pool_replicas", "gauge", "Replicas that answer.", len(found), labels)
        for replica, number in self._numbers[name].of(found).items():
            own = {**labels, "replica": str(number)}
            values = found[replica]["values"]
            for key, text in GAUGES.items():
                _add(families, f"deepinfer_replica_{key}", "gauge", text, values[key], own)
            for key, text in COUNTERS.items():
                _add(families, f"deepinfer_replica_{key}", "counter", text, values[key], own)
            _merge(families, found[replica].get("text", ""), own)

    def _gateway(self, families: dict[str, Metric], address: str) -> None:
        try:
            text = httpx.get(f"{address}/metrics", timeout=5).text
        except httpx.HTTPError as error:
            self._failed(f"gateway {address}", error)
            return
        _merge(families, text, {"gateway": address.removeprefix("http://")})

    def _failed(self, who: str, error: Exception) -> None:
        self._unreachable += 1
        if self._unreachable == 1:
            logger.warning("The metrics of %s are missing: %s. Later failures are counted only.", who, error)


class _Fixed:
    """A collector of what has been gathered."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """See prometheus-client."""
        return self._families


def _add(
    families: dict[str, Metric],
    name: str,
    kind: str,
    text: str,
    value: float,
    labels: Mapping[str, str] | None = None,
) -> None:
    family = families.setdefault(name, Metric(name, text, kind))
    family.add_sample(name + ("_total" if kind == "counter" else ""), dict(labels or {}), float(value))


def _merge(families: dict[str, Metric], text: str, labels: Mapping[str, str]) -> None:
    """Our own families of another endpoint, with labels that say whose they are."""
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(("deepinfer_", "vllm:")):
            continue
        known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                known.add_sample(sample.name, {**labels, **sample.labels}, sample.value)


class MetricsServer:
    """Serves GET /metrics on one address, in a thread of its own.

    Args:
        metrics: what is served.
        host, port: where; port 0: any free one.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, metrics: ApplicationMetrics, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = metrics.render()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                logger.debug(format, *arguments)

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
