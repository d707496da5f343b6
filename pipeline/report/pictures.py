"""The same charts as PNG files, for mails and tickets. matplotlib draws them without a display."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.dates as dates
import matplotlib.pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from pipeline.report.chart import shortened, time_label
from pipeline.report.data import GroupData, ReportData, cost, costs_of

# Names of groups and members, and keys of records, may contain dollar signs. They are no formulas.
mpl.rcParams["text.parse_math"] = False

THOUSANDS = StrMethodFormatter("{x:,.0f}")
PALETTE = ("#0072b2", "#d98200", "#009e73", "#b4508c", "#4ea5d9", "#c4430c", "#8a8000", "#6a5acd")
MOST_GROUPS = 6
DOTS_PER_INCH = 110
ROW_INCHES = 0.16
"""Height of a partition's line in a chart of many partitions."""


def write_pictures(folder: Path, data: ReportData) -> list[Path]:
    """Write ownership-*.png, lag-*.png, rebalances-*.png and moves-*.png for the groups with most trouble."""
    written: list[Path] = []
    for number, group in enumerate(data.groups[:MOST_GROUPS], start=1):
        for kind, draw, worth in (
            ("ownership", _ownership, bool(group.stretches)),
            ("lag", _lag, bool(group.lag)),
            ("rebalances", _rebalances, bool(group.rebalances)),
            ("moves", _moves, any(map(cost, group.moves))),
        ):
            if worth:
                path = folder / f"{kind}-{number}-{file_name(group.group_id)}.png"
                rows = len(group.partitions) if draw is _ownership else 0
                figure, axes = plt.subplots(figsize=(11, max(4.2, ROW_INCHES * rows)), layout="constrained")
                draw(axes, group)
                figure.savefig(path, dpi=DOTS_PER_INCH)
                plt.close(figure)
                written.append(path)
    return written


def file_name(words: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", words)[:60] or "_"


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1_000, UTC)


def _milliseconds(at: float) -> int:
    return round(dates.num2date(at).timestamp() * 1_000)


def _time_axis(axes: Any, group: GroupData) -> None:
    axes.set_xlim(_moment(group.begins_ms), _moment(max(group.ends_ms, group.begins_ms + 1)))
    axes.xaxis.set_major_locator(dates.AutoDateLocator(tz=UTC, maxticks=8))

    def label(at: float, _position: int | None) -> str:
        return time_label(_milliseconds(at), group.ends_ms - group.begins_ms)

    axes.xaxis.set_major_formatter(label)
    axes.set_xlabel("UTC")
    axes.grid(axis="x", alpha=0.25)


Bar = tuple[float, float, float, float]
"""A bar's left edge, bottom, width and height, in the units of the axes."""


def _bars(axes: Any, bars: list[Bar], color: str, label: str | None = None) -> None:
    """Draw all bars of one color as one artist. With one artist for each of thousands of bars, matplotlib needs many
    seconds.
    """
    corners = [
        ((left, low), (left, low + high), (left + wide, low + high), (left + wide, low))
        for left, low, wide, high in bars
    ]
    axes.add_collection(PolyCollection(corners, facecolors=color, edgecolors="none", label=label))
    axes.autoscale_view()


def _ownership(axes: Any, group: GroupData) -> None:
    bars: dict[str, list[Bar]] = {}
    for stretch in group.stretches:
        begins, ends = (dates.date2num(_moment(at)) for at in (stretch.from_ms, stretch.to_ms))
        color = PALETTE[stretch.member % len(PALETTE)]
        bars.setdefault(color, []).append((begins, stretch.row - 0.4, ends - begins, 0.8))
    for color, of_color in bars.items():
        _bars(axes, of_color, color)
    names = [Patch(color=PALETTE[number]) for number in range(min(len(group.members), len(PALETTE)))]
    words = [shortened(name) for name in group.members[: len(names)]]
    axes.legend(names, words, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.set_yticks(range(len(group.partitions)), [shortened(name) for name in group.partitions], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{group.group_id}: who owned which partition (white: nobody)")
    _time_axis(axes, group)


def _lag(axes: Any, group: GroupData) -> None:
    for rebalance in group.rebalances:
        axes.axvline(_moment(rebalance["started_ms"]), color="#888888", linewidth=0.7, linestyle=":")
    for number, (name, line) in enumerate(group.lag):
        axes.plot(
            [_moment(at) for at, _ in line],
            [lag for _, lag in line],
            color=PALETTE[number % len(PALETTE)],
            label=shortened(name),
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("records behind")
    axes.yaxis.set_major_formatter(THOUSANDS)
    # The legend is below the axes, where it hides no line.
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.set_title(f"{group.group_id}: lag (dotted: a rebalance starts)")
    _time_axis(axes, group)


def _rebalances(axes: Any, group: GroupData) -> None:
    base = [0.0] * len(group.rebalances)
    for kind, (name, words) in enumerate(
        (
            ("prepare_ms", "members join"),
            ("sync_ms", "the leader assigns"),
            ("deliver_ms", "members receive their assignment"),
        )
    ):
        high = [(rebalance[name] or 0) / 1_000 for rebalance in group.rebalances]
        bars = [(number - 0.4, low, 0.8, more) for number, (low, more) in enumerate(zip(base, high, strict=True))]
        _bars(axes, bars, PALETTE[kind], words)
        base = [low + more for low, more in zip(base, high, strict=True)]
    for number, took in enumerate(base):
        if not took:
            axes.text(number, 0, "no time", ha="center", va="bottom", fontsize=7, color="#888888")
    axes.set_ylim(bottom=0)
    skip = max(1, len(group.rebalances) // 30)
    numbers = [str(rebalance["rebalance"]) for rebalance in group.rebalances]
    axes.set_xticks(range(0, len(numbers), skip), numbers[::skip])
    axes.set_ylabel("seconds")
    axes.set_xlabel("number of the rebalance")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes.set_title(f"{group.group_id}: how long rebalances took")


def _moves(axes: Any, group: GroupData) -> None:
    moves, series = [move for move in group.moves if cost(move)], costs_of(group.moves)
    wide = 0.84 / len(series)
    for kind, (name, words) in enumerate(series):
        left = (kind - len(series) / 2) * wide
        bars: list[Bar] = [(number + left, 0.0, wide * 0.93, move.get(name) or 0) for number, move in enumerate(moves)]
        _bars(axes, bars, PALETTE[kind], words)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(moves)) if len(moves) <= 20 else [])
    axes.set_ylabel("records")
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.set_xlabel("moves that cost something, in their order")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes.set_title(f"{group.group_id}: records processed twice or passed over")
