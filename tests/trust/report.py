"""Write a run's report: one HTML file without scripts. It has the verdict, the faults and the clients' rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from tests.trust.history import Consumed, Faulted, History, OffsetCommitted, Outcome, OwnerChanged, Produced
from tests.trust.run import Verdict

WIDTH, LANE, LABEL = 1_100, 64, 190

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --paper: #fff; --line: #d8dde5; --bar: #2f6fb5;
  --fault: #c8553d33; --bad: #b3261e; --good: #2e7d4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b2; --paper: #14181f; --line: #2c333e;
  --bar: #6ea8e6; --fault: #e07a5f40; --bad: #ff8a80; --good: #7fd1a0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1140px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } .bad { color: var(--bad); } .good { color: var(--good); }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .bar { fill: var(--bar); } svg .fault { fill: var(--fault); }
svg .axis { stroke: var(--line); } p.soft { color: var(--soft); }
"""


def write_report(path: Path, verdict: Verdict, commit: str) -> None:
    """Write the report to `path`. `commit` is the commit of the attacked sources."""
    failed = [name for name, sentences in verdict.violations.items() if sentences]
    headline = "Every promise was kept" if verdict.passed else f"Broken: {', '.join(failed)}"
    counts = ", ".join(f"{count:,} {name}" for name, count in verdict.counts.items())
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Trust run, seed {verdict.seed}</title><style>{STYLE}</style>"
        f"<h1 class={'good' if verdict.passed else 'bad'}>{escape(headline)}</h1>"
        f"<p class=soft>Seed {verdict.seed}, {verdict.seconds:.0f} s, commit {escape(commit)}. {escape(counts)}.</p>"
        f"<h2>What clients saw, per second</h2><p class=soft>Shaded: a fault was under way.</p>"
        f"{_timeline(verdict.history)}"
        f"<h2>Promises</h2><table>{''.join(map(_promise, verdict.violations, verdict.violations.values()))}</table>"
        f"<h2>Faults</h2><table><tr><th>from (s)<th>to (s)<th>what</tr>{_faults(verdict.history)}</table></html>\n"
    )


def _promise(name: str, sentences: Sequence[str]) -> str:
    verdict = "<td class=good>kept" if not sentences else "<td class=bad>broken"
    said = "<br>".join(map(escape, sentences))
    return f"<tr><td>{escape(name)}{verdict}<td>{said}</tr>"


def _faults(history: History) -> str:
    origin_s = _origin(history)
    return "".join(
        f"<tr><td>{fault.began_s - origin_s:.1f}<td>{fault.ended_s - origin_s:.1f}<td>{escape(fault.detail)}</tr>"
        for fault in history.of(Faulted)
    )


def _timeline(history: History) -> str:
    origin_s = _origin(history)
    produced = [each.completed_s for each in history.of(Produced) if each.outcome is Outcome.OK]
    commits = [each.completed_s for each in history.of(OffsetCommitted) if each.outcome is Outcome.OK]
    lanes = {
        "records acknowledged": produced,
        "records consumed": [each.at_s for each in history.of(Consumed)],
        "commits acknowledged": commits,
        "partitions that moved": [each.at_s for each in history.of(OwnerChanged)],
    }
    seconds = max(
        1, int(max((time_s for times in lanes.values() for time_s in times), default=origin_s) - origin_s) + 1
    )
    step = (WIDTH - LABEL) / seconds
    height = LANE * len(lanes) + 24
    shades = "".join(
        f"<rect class=fault x='{LABEL + (fault.began_s - origin_s) * step:.1f}' y=0 height='{height - 24}' "
        f"width='{max(1.0, (fault.ended_s - fault.began_s) * step):.1f}'><title>{escape(fault.detail)}</title></rect>"
        for fault in history.of(Faulted)
    )
    bars = "".join(
        _lane(name, (int(time_s - origin_s) for time_s in times), index, step)
        for index, (name, times) in enumerate(lanes.items())
    )
    marks = "".join(
        f"<text class=soft x='{LABEL + second * step:.1f}' y='{height - 6}'>{second} s</text>"
        for second in range(0, seconds, max(1, -(-seconds // 10)))
    )
    return f"<svg viewBox='0 0 {WIDTH} {height}' role=img aria-label='Rates per second'>{shades}{bars}{marks}</svg>"


def _lane(name: str, seconds: Iterable[int], index: int, step: float) -> str:
    counts = Counter(seconds)
    most = max(counts.values(), default=1)
    floor = LANE * (index + 1) - 6
    bars = "".join(
        f"<rect class=bar x='{LABEL + second * step:.2f}' width='{max(step - 0.3, 0.3):.2f}' "
        f"y='{floor - count / most * (LANE - 18):.1f}' height='{count / most * (LANE - 18):.1f}'/>"
        for second, count in sorted(counts.items())
    )
    return (
        f"<text x=0 y='{floor - 20}'>{escape(name)}</text><text class=soft x=0 y='{floor - 4}'>at most {most:,}</text>"
        f"<line class=axis x1='{LABEL}' x2='{WIDTH}' y1='{floor}' y2='{floor}'/>{bars}"
    )


def _origin(history: History) -> float:
    return min((each.invoked_s for each in history.of(Produced)), default=0.0)
