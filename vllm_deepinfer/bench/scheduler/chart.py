"""Scatter charts as SVG: a dozen lines of text that need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 440, 64
COLOURS = ("#1b6ca8", "#c2410c", "#4d7c0f", "#7e22ce", "#a16207", "#0f766e")

Series = Mapping[str, Sequence[tuple[float, float, str]]]


def scatter(title: str, across: str, up: str, series: Series) -> str:
    """An SVG document.

    Args:
        across, up: what the axes show; `across` is logarithmic.
        series: name to points (x > 0, y, label); each has a colour of its own.
    """
    points = [point for one in series.values() for point in one]
    low, high = _bounds([math.log10(x) for x, _, _ in points])
    top = max((y for _, y, _ in points), default=1.0) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(x) - low) / (high - low)
        return MARGIN + share * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN)

    parts = [_text(WIDTH / 2, 24, title, 15), _text(WIDTH / 2, HEIGHT - 16, f"{across} (log)", 12)]
    parts.append(f'<g transform="rotate(-90 16 {HEIGHT / 2})">{_text(16, HEIGHT / 2, up, 12)}</g>')
    parts += _axes(place, low, high, top)
    for index, (name, one) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(_text(WIDTH - MARGIN, 40 + 15 * index, name, 12, colour, "end"))
        for x, y, label in one:
            cx, cy = place(x, y)
            parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour}"/>')
            parts.append(_text(cx + 6, cy - 5, label, 9, colour, "start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _axes(place: object, low: float, high: float, top: float) -> list[str]:
    assert callable(place)
    parts = []
    for fifth in range(6):
        x, y = 10 ** (low + fifth / 5 * (high - low)), fifth / 5 * top
        (across, floor), (left, up) = place(x, 0.0), place(10**low, y)
        parts.append(_text(across, floor + 16, f"{x:.3g}", 10))
        parts.append(_text(left - 6, up + 3, f"{y:.3g}", 10, anchor="end"))
        parts.append(f'<path d="M{left:.1f} {up:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
    return parts


def _bounds(values: list[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = max(0.05 * (high - low), 0.02)
    return low - pad, high + pad


def _text(x: float, y: float, text: str, size: int, colour: str = "#222", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
