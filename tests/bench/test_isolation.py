"""Latency beside other work: the arithmetic of phases, and a short run on a real gateway."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from bench import isolation
from bench.isolation import Phase, Run, Sample, compare, graph, measure, report

PHASES = [Phase("", 0, 10), Phase("backup", 12, 22, "1 backups"), Phase("", 24, 34)]


def samples(waits_ms: Sequence[float]) -> list[Sample]:
    """Return a hundred records of each phase, all with this waiting time, and some records between the phases."""
    within = [
        Sample(phase.begins_s + number / 10, waited_ms)
        for phase, waited_ms in zip(PHASES, waits_ms, strict=True)
        for number in range(100)
    ]
    return [*within, Sample(11.0, 9_999.0), Sample(23.0, 9_999.0)]


def test_phase_is_compared_with_the_mean_of_the_phases_around_it() -> None:
    (beside,) = compare(Run(PHASES, samples([1.0, 3.0, 3.0]), samples([2.0, 4.0, 2.0])))
    assert (beside.p50_ms, beside.p99_ms, beside.ratio) == (3.0, 3.0, 1.5)
    assert (beside.read_p99_ms, beside.read_ratio) == (4.0, 2.0)
    assert not beside.met


def test_ratio_at_the_target_is_met_for_both_latencies() -> None:
    (beside,) = compare(Run(PHASES, samples([1.0, 1.5, 1.0]), samples([2.0, 3.0, 2.0])))
    assert beside.met


def test_phase_without_an_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no record of the phase backup was answered"):
        compare(Run(PHASES, [each for each in samples([1, 1, 1]) if not 12 <= each.sent_s < 22], samples([1, 1, 1])))


def test_report_says_what_took_place_and_what_misses() -> None:
    text = report(Run(PHASES, samples([1.0, 2.0, 1.0]), samples([2.0, 2.0, 2.0])), "python -m bench isolation", "a.svg")
    assert "](a.svg)" in text
    assert "| 2.00 ms | 2.00 ms | 2.00 | 2.00 ms | 1.00 | 1 backups | **no** |" in text
    assert "Alone, the p99 to the acknowledgement was 1.00 to 1.00 ms." in text


def test_graph_shades_each_phase_beside_work() -> None:
    svg = ElementTree.fromstring(graph(Run(PHASES, samples([1, 2, 1]), samples([1, 2, 1]))))
    assert [each[0].text for each in svg.iter("{http://www.w3.org/2000/svg}rect")] == ["backup"]


def short_run(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], seconds: float) -> Run:
    monkeypatch.setattr(isolation, "REST_S", 0.5)
    monkeypatch.setattr(isolation, "WARM_UP_S", 2.0)
    monkeypatch.setattr(isolation, "INLINE_BYTES", 24_000_000)
    run = measure(names, seconds=seconds, held_s=seconds, cold_bytes=60_000_000)
    assert [phase.name for phase in run.phases] == ["", *(each for name in names for each in (name, ""))]
    assert all(phase.evidence for phase in run.phases if phase.name)
    assert [beside.phase.name for beside in compare(run)] == names
    # The consumer reads each record that was acknowledged before the last phase ended.
    ends_s = run.phases[-1].ends_s
    assert sum(each.sent_s < ends_s - 1 for each in run.read) >= sum(
        each.sent_s < ends_s - 1 for each in run.acknowledged
    )
    return run


@pytest.mark.long
def test_reader_retention_backup_and_snapshot_do_their_work_beside_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    short_run(monkeypatch, ["cold-reader", "retention", "backup", "snapshot"], 5.0)


@pytest.mark.long
def test_compaction_and_mover_do_their_work_beside_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    # The mover of records (the roller) runs every ten seconds.
    short_run(monkeypatch, ["compaction", "mover"], 15.0)
