"""Charts as SVG text, which a page shows without a script, a font or a network.

The one idea: a chart is drawn in the units of its viewBox. It takes its colours from the page's CSS classes (c0..c7,
grid, ink), so one drawing is used for the light and the dark style.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

COLOURS = 8
WIDTH = 960
LEFT, RIGHT = 150, 16
PLOT = WIDTH - LEFT - RIGHT


def time_label(ms: int, span_ms: int) -> str:
    moment = datetime.fromtimestamp(ms / 1_000, UTC)
    if span_ms > 30 * 86_400_000:
        return moment.strftime("%d %b %Y")
    if span_ms > 2 * 86_400_000:
        return moment.strftime("%d %b %H:%M")
    if span_ms > 120_000:
        return moment.strftime("%H:%M:%S" if span_ms < 3_600_000 else "%H:%M")
    return moment.strftime("%H:%M:%S") + f".{ms % 1_000 // 100}"


def number_label(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ticks(greatest: float) -> list[float]:
    """Return about four round values from 0 to at least `greatest`."""
    if greatest <= 0:
        return [0, 1]
    raw = greatest / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * number for number in range(math.ceil(greatest / step) + 1)]


class Drawing:
    """The SVG text of one chart with this `height`, built element by element."""

    def __init__(self, height: float, label: str) -> None:
        self._height, self._label, self._parts = height, label, list[str]()

    def rect(self, x: float, y: float, width: float, height: float, css: str, title: str = "") -> None:
        told = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" '
            f'height="{height:.1f}">{told}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "grid") -> None:
        self._parts.append(f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", css: str = "") -> None:
        self._parts.append(f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def path(self, points: Iterable[tuple[float, float]], css: str, title: str = "") -> None:
        drawn = " ".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points))
        self._parts.append(f'<path class="{css}" d="{drawn}"><title>{escape(title)}</title></path>')

    def time_axis(self, begins_ms: int, ends_ms: int, y: float) -> None:
        span = max(1, ends_ms - begins_ms)
        for number in range(6):
            at = begins_ms + span * number // 5
            x = LEFT + PLOT * number / 5
            anchor = "end" if number == 5 else "start" if number == 0 else "middle"
            self.line(x, 4, x, y)
            self.text(x, y + 14, time_label(at, span), anchor)

    def value_axis(self, values: Sequence[float], top: float, bottom: float, unit: str = "") -> None:
        for value in values:
            y = bottom - (bottom - top) * value / values[-1]
            self.line(LEFT, y, WIDTH - RIGHT, y)
            self.text(LEFT - 6, y + 4, number_label(value) + unit, "end")

    def svg(self, style: str = "") -> str:
        """Return the chart for a page that has the CSS classes. If a style sheet is given, the chart can be a file of
        its own.
        """
        own = f"<style>{style}</style>" if style else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height:.0f}" role="img" '
            f'aria-label="{escape(self._label, quote=True)}">{own}{"".join(self._parts)}</svg>'
        )


def place(ms: int, begins_ms: int, ends_ms: int) -> float:
    return LEFT + PLOT * (min(max(ms, begins_ms), ends_ms) - begins_ms) / max(1, ends_ms - begins_ms)


def shortened(words: str, most: int = 22) -> str:
    return words if len(words) <= most else f"{words[: most - 8]}…{words[-7:]}"


def colour(number: int) -> str:
    return f"c{number % COLOURS}"
