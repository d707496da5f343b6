"""The audit as one self-contained page and as PNGs."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from pipeline.analyze.findings import seconds
from pipeline.report.chart import LEFT, PLOT, RIGHT, WIDTH, Drawing, number_label, ticks
from pipeline.report.page import STYLE
from pipeline.report.pictures import DOTS_PER_INCH, PALETTE, file_name


def write_audit(folder: Path, found: dict[str, dict[str, Any]]) -> list[Path]:
    """audit.html, and a picture per topic. Gives the pictures."""
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
    cells = (
        ("records", f"{keys['records']:,}"),
        ("partitions", f"{len(told['partitions'])}"),
        ("keys", f"{keys['keys']:,}"),
        ("placed by", told["partitioner"] or "neither hash"),
        ("median value", f"{number_label(median)}B"),
        ("99 in 100 below", f"{number_label(high)}B"),
        ("late records", f"{(late['late'] or 0) / max(1, late['timed'] or 0):.1%}"),
        ("latest by", seconds(late["late_max_ms"] or 0)),
    )
    boxes = "".join(f"<div><dt>{words}</dt><dd>{escape(value)}</dd></div>" for words, value in cells)
    sentences = "".join(f'<li class="note">{escape(sentence)}</li>' for sentence in told["advice"])
    codecs = "".join(
        f"<tr><td>{codec}</td><td>{figures['ratio']:.2f}</td><td>{figures['mb_per_s']:,.0f}</td></tr>"
        for codec, figures in told["compression"].items()
    )
    charts = (
        ("Records per partition", [(str(row["partition"]), row["records"]) for row in told["partitions"]]),
        ("Records per size of the value", [(_size_class(row["size_class"]), row["records"]) for row in told["sizes"]]),
        ("Most frequent keys", [(_key(row["key"]), row["records"]) for row in told.get("hottest_keys", ())[:20]]),
    )
    drawn = "".join(f"<h3>{title}</h3>{_bars(rows, title)}" for title, rows in charts)
    return (
        f'<h2>Topic {escape(name)}</h2><dl class="totals">{boxes}</dl><ul class="findings">{sentences}</ul>{drawn}'
        '<h3>Compression</h3><div class="scroll"><table><thead><tr><th>codec</th><th>times smaller</th>'
        f"<th>MB/s</th></tr></thead><tbody>{codecs}</tbody></table></div>"
    )


def _key(hexadecimal: str) -> str:
    """Readable if it is text, else as it is."""
    try:
        text = bytes.fromhex(hexadecimal).decode()
    except UnicodeDecodeError:
        return hexadecimal[:16]
    return text[:16] if text.isprintable() else hexadecimal[:16]


def _bars(rows: list[tuple[str, int]], label: str) -> str:
    if not rows:
        return '<p class="soft">None.</p>'
    drawing = Drawing(200, label)
    values = ticks(max(value for _, value in rows))
    drawing.value_axis(values, 10, 176)
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    skip = max(1, len(rows) // 8)
    for number, (name, value) in enumerate(rows):
        high = 166 * value / values[-1]
        drawing.rect(LEFT + number * step + 1, 176 - high, min(step - 2, PLOT / 4), high, "c0", f"{name}: {value:,}")
        if number % skip == 0:
            drawing.text(LEFT + number * step + min(step, PLOT / 4) / 2, 191, name, "middle")
    return drawing.svg()


def _picture(folder: Path, name: str, told: dict[str, Any]) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for place, (rows, title) in zip(
        axes,
        (
            ([(str(p["partition"]), p["records"]) for p in told["partitions"]], "records per partition"),
            ([(_size_class(s["size_class"]), s["records"]) for s in told["sizes"]], "records per value size"),
            ([(_key(k["key"]), k["records"]) for k in told.get("hottest_keys", ())[:12]], "most frequent keys"),
        ),
        strict=True,
    ):
        place.bar(range(len(rows)), [value for _, value in rows], color=PALETTE[0])
        place.set_xticks(range(len(rows)), [text for text, _ in rows], rotation=60, fontsize=7)
        place.set_title(f"{name}: {title}")
    path = folder / f"audit-{file_name(name)}.png"
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path
