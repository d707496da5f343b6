"""Graphs of measurements are valid SVG files, and their lines are drawn where their values belong."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from bench.graph import Band, Line, Panel, over_count, over_time
from pipeline.report.chart import LEFT, PLOT

SVG = "{http://www.w3.org/2000/svg}"


def paths(svg: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line by its name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        title = path.find(f"{SVG}title")
        assert title is not None
        points = re.findall(r"[ML]([\d.]+) ([\d.]+)", path.attrib["d"])
        found[title.text or ""] = [(float(x), float(y)) for x, y in points]
    return found


def test_line_over_time_spans_the_phases_and_higher_values_lie_higher() -> None:
    panels = [Panel([Line("p99", [(0, 1.0), (20, 4.0), (40, 2.0)])], "ms", limit=3.0)]
    svg = over_time("Latency", panels, [Band("", 0, 20), Band("a < b", 20, 40)])
    points = paths(svg)["p99"]
    assert [x for x, _ in points] == pytest.approx([LEFT, LEFT + PLOT / 2, LEFT + PLOT], abs=0.1)
    first, second, third = (y for _, y in points)
    assert second < third < first
    shaded = [each.find(f"{SVG}title") for each in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    assert [title.text for title in shaded if title is not None] == ["a < b"]


def test_counts_that_grow_by_one_factor_are_evenly_spread() -> None:
    panels = [Panel([Line("p50", [(1, 1.0), (10, 1.0), (100, 1.0)])], "ms")]
    xs = [x for x, _ in paths(over_count("Latency", panels, [1, 10, 100]))["p50"]]
    assert xs == pytest.approx([LEFT, LEFT + PLOT / 2, LEFT + PLOT], abs=0.1)
