"""Graphs of measurements as SVG files: lines over time with shaded phases, and lines over a growing count.

They are drawn by the charts of `pipeline/report`, with a style sheet of their own, for light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.report.chart import LEFT, PLOT, RIGHT, WIDTH, Drawing, ticks

_COLOURS = ("#2f6fb0", "#c25b1e", "#3b8c4a", "#8a4fa0")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.grid{stroke:#8884}.band{fill:#8882}.limit{stroke:#c22;"
    "stroke-dasharray:6 4}path{fill:none;stroke-width:2}"
    + "".join(
        f"path.s{number}{{stroke:{colour}}}text.s{number}{{fill:{colour}}}" for number, colour in enumerate(_COLOURS)
    )
    + "@media(prefers-color-scheme:dark){text{fill:#aaa}}"
)
PANEL, GAP, TOP = 170, 46, 40


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    """Points of the line: (x, y) in the graph's units."""


@dataclass(frozen=True, slots=True)
class Band:
    """A phase of the measurement. The graph shades a phase that has a name, and writes the name above it."""

    name: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share one scale, which begins at 0. `unit` is written after the scale's numbers."""

    lines: Sequence[Line]
    unit: str
    limit: float | None = None
    """Value at which a dashed horizontal line is drawn."""


def over_time(title: str, panels: Sequence[Panel], bands: Sequence[Band]) -> str:
    """Return a graph over seconds."""
    begins = min((band.begins for band in bands), default=0.0)
    ends = max((band.ends for band in bands), default=1.0)

    def x_of(second: float) -> float:
        return LEFT + PLOT * (min(max(second, begins), ends) - begins) / max(1e-9, ends - begins)

    drawing, bottom = _begin(title, panels)
    for number, band in enumerate(band for band in bands if band.name):
        left, right = x_of(band.begins), x_of(band.ends)
        drawing.rect(left, TOP, right - left, bottom - TOP, "band", band.name)
        drawing.text((left + right) / 2, TOP - 6 - 14 * (number % 2), band.name, "middle")
    _draw(drawing, panels, x_of)
    for number in range(6):
        second = begins + (ends - begins) * number / 5
        drawing.text(x_of(second), bottom + 16, f"{second - begins:.0f} s", "end" if number == 5 else "middle")
    return drawing.svg(STYLE)


def over_count(title: str, panels: Sequence[Panel], counts: Sequence[int]) -> str:
    """Return a graph over counts that grow by a factor, on a logarithmic scale."""
    least, greatest = math.log(min(counts)), math.log(max(counts))

    def x_of(count: float) -> float:
        return LEFT + PLOT * (math.log(count) - least) / max(1e-9, greatest - least)

    drawing, bottom = _begin(title, panels)
    _draw(drawing, panels, x_of)
    for count in counts:
        drawing.line(x_of(count), TOP, x_of(count), bottom)
        drawing.text(x_of(count), bottom + 16, f"{count:,}", "end" if count == counts[-1] else "middle")
    return drawing.svg(STYLE)


def _begin(title: str, panels: Sequence[Panel]) -> tuple[Drawing, float]:
    """Return an empty drawing, and the y position at which its last panel ends."""
    bottom = TOP + len(panels) * PANEL + (len(panels) - 1) * GAP
    return Drawing(bottom + 28, title), bottom


def _draw(drawing: Drawing, panels: Sequence[Panel], x_of: Callable[[float], float]) -> None:
    colour = 0
    for number, panel in enumerate(panels):
        top = TOP + number * (PANEL + GAP)
        bottom = top + PANEL
        greatest = max((y for line in panel.lines for _, y in line.points), default=1.0)
        scale = ticks(max(greatest, panel.limit or 0.0))
        drawing.value_axis(scale, top, bottom, f" {panel.unit}")

        def y_of(value: float, bottom: float = bottom, most: float = scale[-1]) -> float:
            return bottom - PANEL * value / most

        if panel.limit is not None:
            drawing.line(LEFT, y_of(panel.limit), WIDTH - RIGHT, y_of(panel.limit), "limit")
        for line in panel.lines:
            drawing.path([(x_of(x), y_of(y)) for x, y in line.points], f"s{colour}", line.name)
            drawing.text(4, top + 14 + 16 * panel.lines.index(line), line.name, css=f"s{colour}")
            colour = (colour + 1) % len(_COLOURS)
