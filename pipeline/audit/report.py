"""The audit as one self-contained page and as PNGs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.dates as dates
import matplotlib.pyplot as plt

from pipeline.analyze.findings import seconds
from pipeline.report.chart import LEFT, PLOT, RIGHT, WIDTH, Drawing, number_label, place, shortened, ticks, time_label
from pipeline.report.page import STYLE, tiles_of
from pipeline.report.pictures import DOTS_PER_INCH, PALETTE, THOUSANDS, file_name

MOST_KEYS = 20
KEY_ROW, KEY_WORDS = 18, 190
"""Height of a key's line, and the room for its figures, in the units of the drawing."""
BATCH_WORDS = "200 records"


def write_audit(folder: Path, found: dict[str, dict[str, Any]]) -> list[Path]:
    """Write audit.html and a picture per topic. Return the paths of the pictures."""
    sections = "".join(_topic(name, told) for name, told in sorted(found.items()))
    (folder / "audit.html").write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>What is in the topics</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>What is in the topics</h1>{sections}</body></html>\n",
        encoding="utf-8",
    )
    return [_picture(folder, name, told) for name, told in sorted(found.items())]


def _size_class(number: int) -> str:
    return "0" if number == 0 else f"< {number_label(2**number)}B"


def _topic(name: str, told: dict[str, Any]) -> str:
    keys, late = told["keys"], told["lateness"]
    median, high = told["size_figures"]["points"]
    share_late = (late["late"] or 0) / max(1, late["timed"] or 0)
    tiles = (
        ("records", f"{keys['records']:,}", f"of which {keys['tombstones']:,} have no value"),
        ("partitions", f"{len(told['partitions'])}", "that hold records"),
        ("keys", f"{keys['keys']:,}", "that differ from each other"),
        ("placed by", told["partitioner"] or "neither hash", "the hash of the key that chose the partition"),
        ("median value", f"{number_label(median)}B", "half of the values are smaller"),
        ("large values", f"{number_label(high)}B", "99 of 100 values are smaller"),
        ("late records", f"{share_late:.1%}", "a record before them in their partition is over a second younger"),
        ("latest record", seconds(late["late_max_ms"] or 0), "behind a record before it in its partition"),
    )
    sentences = "".join(f'<li class="note">{escape(sentence)}</li>' for sentence in told["advice"])
    codecs = "".join(
        f"<tr><td>{codec}</td><td>{figures['ratio']:.2f}</td><td>{figures['mb_per_s']:,.0f}</td></tr>"
        for codec, figures in told["compression"].items()
    )
    spans = told.get("over_time", ())
    over_time = "".join(
        f"<h3>{title} per {span_words(spans[0]['span_ms'])}, by the records' timestamps (UTC)</h3>"
        f"{_columns_over_time(spans, column, title, unit)}"
        for title, column, unit in (("Records", "records", ""), ("Bytes of key, value and headers", "bytes", "B"))
        if spans
    )
    partitions = [(str(row["partition"]), row["records"]) for row in told["partitions"]]
    sizes = [(_size_class(row["size_class"]), row["records"]) for row in told["sizes"]]
    hottest = list(told.get("hottest_keys", ()))
    frequent = f"The {min(len(hottest), MOST_KEYS)} most frequent of {keys['keys']:,} keys"
    return (
        f'<h2>Topic {escape(name)}</h2>{tiles_of(tiles)}<ul class="findings">{sentences}</ul>{over_time}'
        f"<h3>Records per partition</h3>{_bars(partitions, 'Records per partition', 'partition')}"
        f"<h3>Records per size of the value</h3>{_bars(sizes, 'Records per size of the value', 'size')}"
        f"<h3>{frequent}, and their share of the topic's records</h3>{_keys(hottest[:MOST_KEYS])}"
        f'<h3>Compression</h3><p class="soft">A sample of values, in batches of {BATCH_WORDS}, on one core of this '
        'machine. MB are those before compression.</p><div class="scroll"><table><thead><tr><th>codec</th>'
        f"<th>times smaller</th><th>MB per second</th></tr></thead><tbody>{codecs}</tbody></table></div>"
    )


def span_words(ms: int) -> str:
    """Return a length of time in words, such as "10 minutes" or "hour"."""
    for unit, size in (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000)):
        if ms >= size:
            return unit if ms == size else f"{ms // size:,} {unit}s"
    return f"{ms} milliseconds"


def _columns_over_time(spans: Sequence[dict[str, Any]], column: str, label: str, unit: str) -> str:
    """Draw a bar for each span of time that has records."""
    drawing = Drawing(190, label)
    span_ms = spans[0]["span_ms"]
    begins, ends = spans[0]["begins_ms"], spans[-1]["begins_ms"] + span_ms
    values = ticks(max(span[column] for span in spans))
    drawing.time_axis(begins, ends, 166)
    drawing.value_axis(values, 10, 166, unit)
    for span in spans:
        left, right = (place(at, begins, ends) for at in (span["begins_ms"], span["begins_ms"] + span_ms))
        high = 156 * span[column] / values[-1]
        words = f"{time_label(span['begins_ms'], ends - begins)}: {span[column]:,} {unit or 'records'}"
        drawing.rect(left, 166 - high, max(1.0, right - left - 1), high, "c0", words)
    return drawing.svg()


def _keys(rows: Sequence[dict[str, Any]]) -> str:
    """Draw a line per key, with the name of each."""
    if not rows:
        return '<p class="soft">No record has a key.</p>'
    drawing = Drawing(len(rows) * KEY_ROW + 8, "Most frequent keys")
    most = max(row["records"] for row in rows)
    for number, row in enumerate(rows):
        y, name = number * KEY_ROW + 4, _key(row["key"])
        high, wide = KEY_ROW - 5, (PLOT - KEY_WORDS) * row["records"] / most
        drawing.text(LEFT - 6, y + high - 2, name, "end", "ink")
        where = "several partitions" if row["partitions"] > 1 else f"partition {row['partition']}"
        drawing.rect(LEFT, y, wide, high, "c0", f"{name}: {row['records']:,} records in {where}")
        drawing.text(LEFT + wide + 6, y + high - 2, f"{row['records']:,} ({row['share']:.1%}), {where}")
    return drawing.svg()


def _key(hexadecimal: str) -> str:
    """Return bytes as text if they are readable, otherwise in hexadecimal digits."""
    try:
        text = bytes.fromhex(hexadecimal).decode()
    except UnicodeDecodeError:
        return shortened(hexadecimal)
    return shortened(text if text.isprintable() else hexadecimal)


def _bars(rows: list[tuple[str, int]], label: str, axis: str) -> str:
    if not rows:
        return '<p class="soft">None.</p>'
    drawing = Drawing(214, label)
    values = ticks(max(value for _, value in rows))
    drawing.value_axis(values, 10, 176)
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    # A letter of a name is about 7 units wide.
    skip = max(1, math.ceil(max(len(name) for name, _ in rows) * 7 / step))
    for number, (name, value) in enumerate(rows):
        high = 166 * value / values[-1]
        drawing.rect(LEFT + number * step + 1, 176 - high, min(step - 2, PLOT / 4), high, "c0", f"{name}: {value:,}")
        if number % skip == 0:
            drawing.text(LEFT + number * step + min(step, PLOT / 4) / 2, 191, name, "middle")
    drawing.text(LEFT - 6, 191, axis, "end")
    drawing.text(LEFT - 6, 207, "upwards: records", "end")
    return drawing.svg()


def _picture(folder: Path, name: str, told: dict[str, Any]) -> Path:
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    spans, keys = told.get("over_time", ()), list(told.get("hottest_keys", ()))[:MOST_KEYS]
    first, second, third, fourth = axes.flat
    if spans:
        wide = spans[0]["span_ms"] / 86_400_000
        moments = [datetime.fromtimestamp(span["begins_ms"] / 1_000, UTC) for span in spans]
        first.bar(moments, [span["records"] for span in spans], width=wide * 0.9, align="edge", color=PALETTE[0])
        locator = dates.AutoDateLocator()
        first.xaxis.set_major_locator(locator)
        first.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
        first.set_title(f"{name}: records per {span_words(spans[0]['span_ms'])} (UTC)")
    second.barh(range(len(keys)), [key["records"] for key in keys], color=PALETTE[0])
    second.set_yticks(range(len(keys)), [_key(key["key"]) for key in keys])
    second.invert_yaxis()
    second.set_title(f"{name}: the {len(keys)} most frequent keys")
    second.set_xlabel("records")
    for axes_of, rows, title, unit in (
        (third, [(str(p["partition"]), p["records"]) for p in told["partitions"]], "per partition", "partition"),
        (
            fourth,
            [(_size_class(s["size_class"]), s["records"]) for s in told["sizes"]],
            "per size",
            "size of the value",
        ),
    ):
        axes_of.bar(range(len(rows)), [value for _, value in rows], color=PALETTE[0])
        skip = max(1, len(rows) // 16)
        axes_of.set_xticks(range(0, len(rows), skip), [text for text, _ in rows][::skip], fontsize=8, rotation=30)
        axes_of.set_title(f"{name}: records {title}")
        axes_of.set_xlabel(unit)
    for axes_of in (first, third, fourth):
        axes_of.set_ylabel("records")
        axes_of.yaxis.set_major_formatter(THOUSANDS)
    second.xaxis.set_major_formatter(THOUSANDS)
    second.tick_params(axis="y", labelsize=8)
    path = folder / f"audit-{file_name(name)}.png"
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path
