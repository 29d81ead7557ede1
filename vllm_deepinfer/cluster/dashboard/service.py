"""What clients see, measured at the gateways."""

from __future__ import annotations

from .model import GATEWAY, Panel, Query, Row
from .queries import quantile, rate, share, total

QUANTILES = (0.5, 0.95, 0.99)
WORK = f'{GATEWAY}, route!~"/(metrics|health|ready|status.*)?"'
_TOKENS = "deepinfer_gateway_tokens_total"


def _quantiles(histogram: str, matching: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, histogram, "", matching), f"p{q * 100:g}") for q in QUANTILES)


def _by_reason(metric: str, kind: str) -> Query:
    return Query(rate(metric, "reason", GATEWAY), f"{kind}: {{{{reason}}}}")


SERVICE = Row(
    "Service",
    (
        Panel(
            "Requests",
            "Answered requests by HTTP status; 429 is overload, 5xx a failure.",
            "reqps",
            (Query(rate("deepinfer_gateway_requests_total", "status", WORK), "{{status}}"),),
            stacked=True,
        ),
        Panel(
            "Time to first token",
            "From the request to its first token, at the gateway.",
            "s",
            _quantiles("deepinfer_gateway_ttft_seconds", GATEWAY),
        ),
        Panel(
            "Inter-token latency",
            "Between two deltas of a stream, at the gateway.",
            "s",
            _quantiles("deepinfer_gateway_itl_seconds", GATEWAY),
        ),
        Panel(
            "Tokens",
            "Prompt tokens, those of them that a cache served, answers, and drafts that were accepted.",
            "short",
            (Query(rate(_TOKENS, "kind", GATEWAY), "{{kind}}"),),
        ),
        Panel(
            "Prompt tokens from a cache",
            "Share of prompt tokens that needed no prefill.",
            "percentunit",
            (
                Query(
                    share(
                        rate(_TOKENS, "", f'kind="cached", {GATEWAY}'),
                        rate(_TOKENS, "", f'kind="prompt", {GATEWAY}'),
                    ),
                    "cached",
                ),
            ),
            most=1,
        ),
        Panel(
            "Refused, failed, ended early",
            "Requests that got no whole answer, by reason.",
            "reqps",
            (
                _by_reason("deepinfer_gateway_refusals_total", "refused"),
                _by_reason("deepinfer_gateway_failures_total", "failed"),
                _by_reason("deepinfer_gateway_aborts_total", "ended"),
            ),
        ),
        Panel(
            "Requests in work",
            "Per gateway process.",
            "short",
            (Query(total("deepinfer_gateway_active_requests", "gateway", GATEWAY), "{{gateway}}"),),
            stacked=True,
        ),
        Panel(
            "Duration",
            "From the request to the last byte, 95th percentile by route.",
            "s",
            (Query(quantile(0.95, "deepinfer_gateway_duration_seconds", "route", WORK), "{{route}}"),),
        ),
    ),
)
