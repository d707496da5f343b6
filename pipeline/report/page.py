"""The report as one HTML file. It needs no script, fetches nothing, and has a light and a dark style.

The one idea: the page begins with the findings. Charts follow for each group. Each chart marks the group's rebalances,
so that a reader sees a peak of lag beside its cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeline.analyze.findings import counted, seconds
from pipeline.report.chart import (
    COLOURS,
    LEFT,
    PLOT,
    RIGHT,
    WIDTH,
    Drawing,
    colour,
    number_label,
    place,
    shortened,
    ticks,
    time_label,
)
from pipeline.report.data import GroupData, ReportData, cost, costs_of

STYLE = files("pipeline.report").joinpath("style.css").read_text(encoding="utf-8") + "".join(
    f"svg rect.c{n} {{ fill: var(--c{n}); }} svg path.c{n} {{ stroke: var(--c{n}); }} .legend i.c{n} "
    f"{{ background: var(--c{n}); }}\n"
    for n in range(8)
)

FIRST_FINDINGS = 10
MOST_NAMES = 24
PERIOD_MS = 7 * 86_400_000
"""A length of time for which `time_label` shows day, hour and minute."""
MOST_WIDE = 120
"""Maximal width of a move's bar. Only a bar of this width shows a name."""

TOTALS = (
    ("groups", "groups", "that had a rebalance"),
    ("members", "members", "consumers that joined a group"),
    ("rebalances", "rebalances", "new divisions of partitions among members"),
    ("moves", "partitions moved", "from one member to another"),
    ("unowned_partition_ms", "idle, all partitions", "time without an owner, added up over the partitions"),
    ("duplicates", "records twice", "read by the old and the new owner"),
    ("duplicates_min", "records twice, at least", "read by the old and the new owner"),
    ("forced", "forced handoffs", "the old owner did not release its partition in time"),
    ("storms", "storms", "rebalances that followed each other without a pause"),
    ("violations", "rules broken", "two owners at once, or an offset that went back"),
)


TABLE_HEADS = (
    ("number", ""),
    ("started", "time of day, UTC"),
    ("why", ""),
    ("by", "the member that caused it"),
    ("outcome", ""),
    ("took", "from its start until the last member had its assignment"),
    ("members", "before → after"),
    ("moved (least)", "partitions that changed their owner, and how many had to"),
    ("sticky", "the least that had to move, as a share of what moved"),
    ("idle", "time without an owner, added up over the partitions"),
)


def write_page(path: Path, data: ReportData, *, title: str = "What rebalances cost", extra: Sequence[str] = ()) -> None:
    """Write the page. `extra` holds additional sections, as HTML."""
    sections = [_findings(data), *extra, *(_group(group) for group in data.groups)]
    if data.groups_left_out:
        sections.append(
            f'<p class="soft">{counted(data.groups_left_out, "more group")} are in the tables, not drawn here.</p>'
        )
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{_period(data)}{_totals(data)}"
        f"{''.join(sections)}</body></html>\n",
        encoding="utf-8",
    )


def _period(data: ReportData) -> str:
    if not data.groups:
        return '<p class="soft">No group rebalanced in this journal.</p>'
    begins = min(group.begins_ms for group in data.groups)
    ends = max(group.ends_ms for group in data.groups)
    return (
        f'<p class="soft">{time_label(begins, PERIOD_MS)} to {time_label(ends, PERIOD_MS)} UTC, '
        f"{seconds(ends - begins)}, from {escape(data.source)}</p>"
    )


def _totals(data: ReportData) -> str:
    cells: list[tuple[str, str, str]] = []
    for name, words, note in TOTALS:
        if name not in data.totals or (name == "duplicates_min" and "duplicates" in data.totals):
            continue
        value = data.totals[name]
        shown = seconds(value) if name.endswith("_ms") else f"{value:,}"
        cells.append((words, shown, note))
    return tiles_of(cells)


def tiles_of(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return figures as HTML. Each has its name and a note on what it counts."""
    cells = "".join(
        f'<div><dt>{escape(words)}</dt><dd>{escape(value)}</dd><dd class="what">{escape(what)}</dd></div>'
        for words, value, what in tiles
    )
    return f'<dl class="totals">{cells}</dl>'


def _findings(data: ReportData) -> str:
    items = [
        f'<li class="{finding.severity}"><b>{finding.severity}</b>{escape(finding.says)}</li>'
        for finding in data.findings
    ]
    shown, more = items[:FIRST_FINDINGS], items[FIRST_FINDINGS:]
    folded = (
        f"<details><summary>{counted(len(more), 'more finding')}</summary><ul "
        f'class="findings">{"".join(more)}</ul></details>'
        if more
        else ""
    )
    return f'<h2>Findings</h2><ul class="findings">{"".join(shown) or "<li>Nothing stands out.</li>"}</ul>{folded}'


def _group(group: GroupData) -> str:
    parts = [f"<h2>Group {escape(group.group_id)}</h2>"]
    if group.left_out:
        parts.append(f'<p class="soft">Not drawn: {escape("; ".join(group.left_out))}. The tables have them.</p>')
    if group.stretches:
        parts.append(_figure("Who owned which partition", timeline(group), _legend(group.members)))
    if group.lag:
        parts.append(
            _figure(
                "Records behind (greatest of each stretch; dashed: a rebalance starts)",
                lag_lines(group),
                _legend([name for name, _ in group.lag]),
            )
        )
    if group.rebalances:
        parts.append(
            _figure(
                "How long each rebalance took (grey: no time, as when all members left; dashed: overtaken by the next)",
                durations(group),
                _legend(("members join", "the leader assigns", "members receive their assignment")),
            )
        )
    if any(cost(move) for move in group.moves):
        parts.append(
            _figure(
                "Records processed twice, or passed over, per move",
                costs(group),
                _legend([words for _, words in costs_of(group.moves)]),
            )
        )
    if group.rebalances:
        parts.append(_rebalance_table(group.rebalances))
    return "".join(parts)


def _figure(title: str, svg: str, legend: str) -> str:
    return f'<h3>{escape(title)}</h3>{legend}<div class="scroll">{svg}</div>'


def _legend(names: Sequence[str]) -> str:
    items = [
        f'<span title="{escape(name, quote=True)}"><i class="{colour(number)}"></i>{escape(shortened(name, 40))}</span>'
        for number, name in enumerate(names[:MOST_NAMES])
    ]
    if len(names) > MOST_NAMES:
        items.append(f"<span>and {len(names) - MOST_NAMES:,} more; the bars name them</span>")
    if len(names) > COLOURS:
        items.append(f"<span>({COLOURS} colours, so several share one)</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def timeline(group: GroupData) -> str:
    row = max(10, min(20, 480 // max(1, len(group.partitions))))
    height = row * len(group.partitions) + 26
    drawing = Drawing(height, f"Owners of {len(group.partitions)} partitions of group {group.group_id} over time")
    bottom = height - 20
    drawing.time_axis(group.begins_ms, group.ends_ms, bottom)
    for number, name in enumerate(group.partitions):
        drawing.rect(LEFT, 4 + number * row + 1, PLOT, row - 3, "idle", f"{name}: no owner")
        drawing.text(LEFT - 6, 4 + number * row + row - 4, shortened(name), "end")
    for stretch in group.stretches:
        x = place(stretch.from_ms, group.begins_ms, group.ends_ms)
        width = place(stretch.to_ms, group.begins_ms, group.ends_ms) - x
        held = seconds(stretch.to_ms - stretch.from_ms)
        told = f"{group.partitions[stretch.row]}: {group.members[stretch.member]} for {held}"
        drawing.rect(x, 4 + stretch.row * row + 1, width, row - 3, colour(stretch.member), told)
    return drawing.svg()


def lag_lines(group: GroupData) -> str:
    drawing = Drawing(240, f"Lag of group {group.group_id} over time")
    values = ticks(max(lag for _, line in group.lag for _, lag in line))
    drawing.time_axis(group.begins_ms, group.ends_ms, 216)
    drawing.value_axis(values, 10, 216)
    for rebalance in group.rebalances:
        x = place(rebalance["started_ms"], group.begins_ms, group.ends_ms)
        drawing.line(x, 10, x, 216, "mark")
    for number, (name, line) in enumerate(group.lag):
        points = [(place(at, group.begins_ms, group.ends_ms), 216 - 206 * lag / values[-1]) for at, lag in line]
        drawing.path(points, colour(number), name)
    return drawing.svg()


def durations(group: GroupData) -> str:
    drawing = Drawing(220, f"Durations of {len(group.rebalances)} rebalances of group {group.group_id}")
    values = ticks(max((rebalance["duration_ms"] or 0) for rebalance in group.rebalances) / 1_000)
    drawing.value_axis(values, 10, 196, " s")
    step = (WIDTH - LEFT - RIGHT) / len(group.rebalances)
    for number, rebalance in enumerate(group.rebalances):
        base = 196.0
        told = (
            f"rebalance {rebalance['rebalance']} ({rebalance['trigger_reason']}): {rebalance['outcome']}, "
            f"{seconds(rebalance['duration_ms'] or 0)}, {rebalance['partitions_moved'] or 0} moved"
        )
        for kind, name in enumerate(("prepare_ms", "sync_ms", "deliver_ms")):
            high = 186 * (rebalance[name] or 0) / 1_000 / values[-1]
            if high > 0:
                drawing.rect(LEFT + number * step, base - high, max(1.0, step - 2), high, colour(kind), told)
                base -= high
        if base == 196.0:
            drawing.rect(LEFT + number * step, 193, max(1.0, step - 2), 3, "idle", told)
        if rebalance["outcome"] == "superseded":
            middle = LEFT + (number + 0.5) * step
            drawing.line(middle, 10, middle, 196, "bad")
    # A digit of a number is about 7 units wide.
    skip = max(1, math.ceil(len(str(group.rebalances[-1]["rebalance"])) * 7 / step))
    for number, rebalance in list(enumerate(group.rebalances))[::skip]:
        drawing.text(LEFT + (number + 0.5) * step, 214, str(rebalance["rebalance"]), "middle")
    drawing.text(LEFT - 6, 214, "number of the rebalance", "end")
    return drawing.svg()


def costs(group: GroupData) -> str:
    moves, series = [move for move in group.moves if cost(move)], costs_of(group.moves)
    drawing = Drawing(220, f"Records twice or passed over in {len(moves)} moves of group {group.group_id}")
    values = ticks(max(move.get(name) or 0 for move in moves for name, _ in series))
    drawing.value_axis(values, 10, 196)
    step = min(MOST_WIDE, PLOT / len(moves))
    for number, move in enumerate(moves):
        told = (
            f"{move['topic']}-{move['partition']} from {move['source_member_id']} to "
            f"{move['target_member_id']}: twice at least "
            f"{move['duplicates_min'] or 0:,}, at most {number_label(move['duplicates_max'] or 0)}, passed "
            f"over {move['skipped'] or 0:,}"
        )
        if "duplicates" in move:
            told += f"; by the members' logs {move['duplicates'] or 0:,} twice, {move['gap_records'] or 0:,} by nobody"
        for kind, (name, _) in enumerate(series):
            high = 186 * (move.get(name) or 0) / values[-1]
            if high > 0:
                wide = step / len(series)
                x = LEFT + number * step + kind * wide
                drawing.rect(x, 196 - high, max(1.0, wide - 1), high, colour(kind), told)
    if step == MOST_WIDE:
        for number, move in enumerate(moves):
            name = shortened(f"{move['topic']}-{move['partition']}", 18)
            drawing.text(LEFT + (number + 0.5) * step, 214, name, "middle")
    else:
        drawing.text(LEFT, 214, "the first move that cost something")
        drawing.text(WIDTH - RIGHT, 214, f"the last of {len(moves)}", "end")
    return drawing.svg()


def _rebalance_table(rebalances: Sequence[dict[str, Any]]) -> str:
    rows: list[str] = []
    for rebalance in rebalances:
        stuck = rebalance["stickiness"]
        cells = (
            str(rebalance["rebalance"]),
            time_label(rebalance["started_ms"], 10**7),
            rebalance["trigger_reason"] or "",
            shortened(rebalance["trigger_member_id"] or "", 24),
            rebalance["outcome"],
            seconds(rebalance["duration_ms"] or 0),
            f"{rebalance['members_before'] or 0} → "
            f"{'' if rebalance['members_after'] is None else rebalance['members_after']}",
            f"{rebalance['partitions_moved'] or 0} ({rebalance['minimum_moves'] or 0})",
            "" if stuck is None else f"{stuck:.0%}",
            seconds(rebalance["unowned_partition_ms"] or 0),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = "".join(f'<th title="{escape(what, quote=True)}">{name}</th>' for name, what in TABLE_HEADS)
    told = "".join(f"<li><b>{name}</b>{escape(what)}</li>" for name, what in TABLE_HEADS if what)
    return (
        f'<details><summary>{counted(len(rebalances), "rebalance")} as a table</summary><div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<ul class="words">{told}</ul></details>'
    )
