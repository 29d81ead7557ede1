"""One log line every ten seconds, and only if something is wrong."""

from __future__ import annotations

from .report import StepReport

EVERY = 10.0  # seconds
LATE = 1.1  # measured ITL over target that is worth a line
INACCURATE = 250_000  # median relative error of the cost model, in parts per million
LEAST = 50  # steps with decodes that a share is told of


class Complaints:
    """Collects between two lines what an operator should know."""

    def __init__(self, itl_target_ms: float | None) -> None:
        self._target = itl_target_ms * 1e3 * LATE if itl_target_ms else None
        self._last: float | None = None
        self._latest: StepReport | None = None
        self._told = {"forced": 0, "ignored_targets": 0}
        self._reset()

    def note(self, report: StepReport) -> None:
        """A step has ended."""
        self._latest = report
        if report.decodes:
            self._decoded += 1
            self._late += self._target is not None and report.period > self._target

    def line(self, now: float) -> str | None:
        """What is wrong, at most every ten seconds."""
        if self._last is None:
            self._last = now
        if now - self._last < EVERY or self._latest is None:
            return None
        self._last = now
        found = self._found(self._latest)
        self._reset()
        return f"Time-budget scheduler: {'; '.join(found)}." if found else None

    def _found(self, latest: StepReport) -> list[str]:
        found = []
        if not latest.usable:
            found.append("no usable cost model yet, chunks are vLLM's own")
        elif latest.error_median > INACCURATE:
            found.append(f"the cost model is off by {latest.error_median / 1e4:.0f} % (median)")
        if self._decoded >= LEAST and self._late > 0.02 * self._decoded:
            found.append(
                f"{100 * self._late / self._decoded:.0f} % of the steps took over {LATE:g} x the ITL target"
            )
        if forced := self._since("forced", latest.forced):
            found.append(
                f"{forced} steps went over their budget because decodes left no room for prefill: "
                "raise the target or lower --max-num-seqs"
            )
        if ignored := self._since("ignored_targets", latest.ignored_targets):
            found.append(f"{ignored} targets of requests were ignored, being no positive numbers")
        return found

    def _since(self, name: str, total: int) -> int:
        grown = total - self._told[name]
        self._told[name] = total
        return grown

    def _reset(self) -> None:
        self._decoded = self._late = 0
