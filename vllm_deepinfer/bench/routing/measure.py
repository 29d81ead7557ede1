"""What a client saw of one pass over a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_deepinfer.bench.routing.client import Record
from vllm_deepinfer.bench.routing.trace import Arrival


@dataclass(frozen=True)
class Window:
    """The part of a trace that counts, in seconds: pools fill up before it, and run empty after it."""

    begin: float
    end: float


@dataclass(frozen=True)
class Pass:
    """One policy, one round.

    Attributes:
        ttft: sorted seconds to the first token, of the requests that were sent in the window; of one that had
            none when the client gave up, what it had waited until then.
        itl: sorted seconds between two tokens of an answer, both in the window.
        unfinished: requests that the client gave up.
        lost: requests that ended with anything but their whole answer; unfinished ones are not among them.
        missing, doubled: tokens, of the answers that ended.
        tokens: of all answers. late: most seconds that the client itself was late to send.
    """

    ttft: list[float]
    itl: list[float]
    unfinished: int
    lost: int
    missing: int
    doubled: int
    tokens: int
    late: float

    def quantiles(self) -> dict[str, float | int]:
        """For a series."""
        return {
            **{f"ttft_p{share}_s": quantile(self.ttft, share / 100) for share in (50, 90, 99)},
            **{f"itl_p{share}_s": quantile(self.itl, share / 100) for share in (50, 90, 99)},
            "requests": len(self.ttft),
            "unfinished": self.unfinished,
            "lost": self.lost,
            "client_late_s": self.late,
        }


def summarise(
    arrivals: Sequence[Arrival], records: Sequence[Record], window: Window, patience_s: float
) -> Pass:
    """Raises: RuntimeError if nothing was measured."""
    gave_up = max(arrival.at for arrival in arrivals) + patience_s
    ttft, itl = [], []
    for record in records:
        if window.begin <= record.sent < window.end:
            ttft.append((record.events[0] if record.events else gave_up) - record.sent)
        inside = [at for at in record.events if window.begin <= at < window.end]
        itl += [later - earlier for earlier, later in pairwise(inside)]
    if not (ttft and itl):
        raise RuntimeError("no token arrived while it was measured; is the machine busy with something else?")
    return Pass(
        ttft=sorted(ttft),
        itl=sorted(itl),
        unfinished=sum(record.ended is None and not record.fault for record in records),
        lost=sum(bool(record.fault or record.missing) for record in records),
        missing=sum(record.missing for record in records),
        doubled=sum(record.doubled for record in records),
        tokens=sum(len(record.events) for record in records),
        late=max(record.sent - arrival.at for arrival, record in zip(arrivals, records, strict=True)),
    )


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of sorted values."""
    return values[min(len(values) - 1, int(q * len(values)))]
