"""A loss curve as an SVG file, written by hand: one line, two axes, round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 32, 40

Points = Sequence[tuple[float, float]]


def svg(title: str, points: Points, *, x: str, y: str) -> str:
    """A line through points with increasing x, beside its running mean of a fiftieth of them.

    Args:
        title, x, y: Names of the chart and its axes.
        points: At least one, all finite.
    """
    ticks_x = ticks(points[0][0], points[-1][0])
    ticks_y = ticks(min(value for _, value in points), max(value for _, value in points))
    across, up = _scale(ticks_x, _LEFT, WIDTH - _RIGHT), _scale(ticks_y, HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for tick in ticks_y:
        parts.append(
            f'<path d="M{_LEFT} {up(tick):.1f}H{WIDTH - _RIGHT}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in ticks_x:
        parts.append(
            f'<text x="{across(tick):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        )
    for line, color, width in ((points, "#bbb", 1), (running_mean(points), "#06c", 2)):
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x)}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="20" text-anchor="end">{escape(y)}</text></svg>\n')
    return "\n".join(parts)


def running_mean(points: Points) -> list[tuple[float, float]]:
    """Each value replaced by the mean of the last fiftieth of all, itself included."""
    size = max(1, len(points) // 50)
    means = []
    for end in range(1, len(points) + 1):
        window = [value for _, value in points[max(0, end - size) : end]]
        means.append((points[end - 1][0], sum(window) / len(window)))
    return means


def ticks(low: float, high: float) -> list[float]:
    """Three to nine round numbers, evenly spaced, that enclose both ends."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _scale(around: list[float], start: float, end: float):  # type: ignore[no-untyped-def]
    low, span = around[0], around[-1] - around[0]
    return lambda value: start + (value - low) / span * (end - start)
