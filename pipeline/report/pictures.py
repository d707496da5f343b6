"""The same charts as PNG files, for mails and tickets: drawn by matplotlib, without a display."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.dates as dates
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from pipeline.report.chart import shortened, time_label
from pipeline.report.data import GroupData, ReportData, cost, costs_of

PALETTE = ("#0072b2", "#d98200", "#009e73", "#b4508c", "#4ea5d9", "#c4430c", "#8a8000", "#6a5acd")
MOST_GROUPS = 6
DOTS_PER_INCH = 110


def write_pictures(folder: Path, data: ReportData) -> list[Path]:
    """ownership-*.png, lag-*.png, rebalances-*.png and moves-*.png of the groups with most trouble."""
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
                figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
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
    axes.xaxis.set_major_formatter(lambda at, _: time_label(_milliseconds(at), group.ends_ms - group.begins_ms))
    axes.set_xlabel("UTC")
    axes.grid(axis="x", alpha=0.25)


def _ownership(axes: Any, group: GroupData) -> None:
    for stretch in group.stretches:
        begins = dates.date2num(_moment(stretch.from_ms))
        wide = dates.date2num(_moment(stretch.to_ms)) - begins
        axes.broken_barh([(begins, wide)], (stretch.row - 0.4, 0.8), color=PALETTE[stretch.member % len(PALETTE)])
    names = [Patch(color=PALETTE[number]) for number in range(min(len(group.members), len(PALETTE)))]
    axes.legend(names, [shortened(name) for name in group.members], fontsize=7, ncols=4, loc="upper center",
                bbox_to_anchor=(0.5, -0.16))  # fmt: skip
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
    axes.legend(fontsize=7, ncols=4)
    axes.set_title(f"{group.group_id}: lag (dotted: a rebalance starts)")
    _time_axis(axes, group)


def _rebalances(axes: Any, group: GroupData) -> None:
    base = [0.0] * len(group.rebalances)
    for kind, (name, words) in enumerate(
        (("prepare_ms", "joining"), ("sync_ms", "assigning"), ("deliver_ms", "telling"))
    ):
        high = [(rebalance[name] or 0) / 1_000 for rebalance in group.rebalances]
        axes.bar(range(len(high)), high, bottom=base, color=PALETTE[kind], label=words)
        base = [low + more for low, more in zip(base, high, strict=True)]
    axes.set_ylabel("seconds")
    axes.set_xlabel("rebalance")
    axes.legend(fontsize=7)
    axes.set_title(f"{group.group_id}: how long rebalances took")


def _moves(axes: Any, group: GroupData) -> None:
    moves, series = [move for move in group.moves if cost(move)], costs_of(group.moves)
    wide = 0.84 / len(series)
    for kind, (name, words) in enumerate(series):
        axes.bar(
            [number + (kind - (len(series) - 1) / 2) * wide for number in range(len(moves))],
            [move.get(name) or 0 for move in moves],
            width=wide * 0.93,
            color=PALETTE[kind],
            label=words,
        )
    axes.set_xticks(range(len(moves)) if len(moves) <= 20 else [])
    axes.set_ylabel("records")
    axes.set_xlabel("moves that cost something, in their order")
    axes.legend(fontsize=7)
    axes.set_title(f"{group.group_id}: records processed twice or passed over")
