"""Single transforms on a few rows, and what a user sees: findings, page, pictures, exit code."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipeline.analyze.findings import MOST_OF_A_KIND, Finding, delivery_findings, findings
from pipeline.analyze.handoffs import delivered
from pipeline.analyze.job import RULES_BROKEN, _tell, write_tables
from pipeline.analyze.journal import DELIVERY, TABLES
from pipeline.analyze.offsets import lag
from pipeline.analyze.ownership import presence
from pipeline.analyze.rebalances import storms
from pipeline.analyze.tables import Thresholds, analyze
from pipeline.progress import Progress, Stop
from pipeline.report.data import (
    MOST_GROUPS,
    MOST_INTERVALS,
    GroupData,
    ReportData,
    Stretch,
    costs_of,
    delivery_data,
    report_data,
)
from pipeline.report.page import costs, write_page
from pipeline.report.pictures import write_pictures
from tests.pipeline.journals import frame, journal_of
from tests.pipeline.planted import Row, journal

pytestmark = pytest.mark.usefixtures("interpreted")


def _commit(seq: int, at_ms: int, offset: int, log_end: int, group_id: str = "g", partition: int = 0) -> Row:
    return {
        "seq": seq, "at_ms": at_ms, "node_id": 1, "group_id": group_id, "kind": "commit", "generation_id": 1,
        "member_id": "m", "topic": "t", "partition": partition, "offset": offset, "log_start_offset": 0,
        "log_end_offset": log_end, "error_code": 0,
    }  # fmt: skip


def test_lag_and_its_age_against_a_plain_loop(spark: SparkSession) -> None:
    chance = random.Random(5)
    rows, ends, now = list[Row](), {0: 10, 1: 10}, 0
    for seq in range(1, 120):
        now += chance.randrange(1, 400)
        partition = chance.randrange(2)
        ends[partition] += chance.randrange(0, 9)
        offset = max(0, ends[partition] - chance.randrange(0, 30))
        rows.append(_commit(seq, now, offset, ends[partition], chance.choice("gh"), partition))
    found = lag(frame(spark, TABLES["journal_offset"], rows), points=100_000).collect()
    assert len(found) == len(rows)
    for row in found:
        (mine,) = [each for each in rows if each["at_ms"] == row.bucket_ms]
        behind = mine["log_end_offset"] - mine["offset"]
        seen = [
            each["at_ms"] for each in rows
            if each["partition"] == row.partition and each["log_end_offset"] > mine["offset"]
        ]  # fmt: skip
        assert (row.lag_min, row.lag_max, row.lag_last) == (behind, behind, behind)
        assert row.time_lag_max_ms == (0 if behind == 0 else max(0, mine["at_ms"] - min(seen)))


def test_thinned_lag_keeps_its_peaks(spark: SparkSession) -> None:
    rows = [_commit(seq, seq * 10, 1_000 - (900 if seq == 37 else 5), 1_000) for seq in range(1, 101)]
    found = lag(frame(spark, TABLES["journal_offset"], rows), points=4).orderBy("bucket_ms").collect()
    assert len(found) == 4
    assert [row.lag_max for row in found] == [5, 900, 5, 5]
    assert [row.lag_last for row in found] == [5, 5, 5, 5]
    assert sum(row.commits for row in found) == 100


def test_of_equal_lags_the_last_says_how_old_the_unread_is(spark: SparkSession) -> None:
    rows = [_commit(1, 100, 0, 5), _commit(2, 150, 9, 10), _commit(3, 200, 7, 12)]
    rows.append(_commit(4, 100, 0, 2**62, partition=1))
    found = lag(frame(spark, TABLES["journal_offset"], rows), points=1).orderBy("partition").collect()
    assert [(row.lag_max, row.time_lag_max_ms) for row in found] == [(5, 50), (2**62, 0)]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([0, 10, 20], [(1, 3)]),
        ([0, 10, 21], []),
        ([0, 10, 20, 30, 40], [(1, 5)]),
        ([0, 10, 20, 100, 110, 120], [(1, 3), (4, 3)]),
        # Both windows have enough rebalances, but no window has a rebalance of each run.
        ([0, 1, 2, 22, 23, 24], [(1, 3), (4, 3)]),
        ([0, 50, 51, 52, 90], [(2, 3)]),
    ],
)
def test_storms(spark: SparkSession, starts: list[int], expected: list[tuple[int, int]]) -> None:
    rows = [("g", number, at, at + 1, "requested", "m", 0) for number, at in enumerate(starts, start=1)]
    table = spark.createDataFrame(
        rows,
        "group_id string, rebalance int, started_ms long, ended_ms long, trigger_reason string, "
        "trigger_member_id string, unowned_partition_ms long",
    )
    found = storms(table, at_least=3, within_ms=20).orderBy("first_rebalance").collect()
    assert [(row.first_rebalance, row.rebalances) for row in found] == expected


def test_what_was_delivered_twice_or_never(spark: SparkSession) -> None:
    runs = [("a", 1, 0, 9), ("a", 2, 10, 19), ("b", 3, 15, 24), ("a", 4, 30, 34), ("a", 5, 12, 12)]
    rows = [
        {
            "group_id": "g",
            "topic": "t",
            "partition": 0,
            "member_id": m,
            "at_ms": at,
            "first_offset": a,
            "last_offset": b,
        }
        for m, at, a, b in runs
    ]
    found = delivered(frame(spark, DELIVERY, rows)).orderBy("stint").collect()
    assert [(row.member_id, row.duplicates, row.gap_records, row.records) for row in found] == [
        ("a", 0, 0, 20),
        ("b", 5, 0, 10),
        ("a", 1, 5, 6),
    ]


def test_member_that_returns_under_its_id_is_present_again(spark: SparkSession) -> None:
    kinds = {
        1: ("rebalance_started", "a"), 2: ("member_joined", "a"), 3: ("member_joined", "b"),
        4: ("generation_created", None),
        7: ("rebalance_started", "b"), 8: ("member_expired", "b"), 9: ("generation_created", None),
        11: ("rebalance_started", "b"), 12: ("member_joined", "b"), 13: ("generation_created", None),
        16: ("rebalance_started", "a"), 17: ("member_left", "a"), 18: ("generation_created", None),
    }  # fmt: skip
    # Each generation names its members again.
    named = {5: "a", 6: "b", 10: "a", 14: "a", 15: "b", 19: "b"}
    common: Row = {"node_id": 1, "group_id": "g", "group_type": "consumer", "generation_id": 1}
    tables: dict[str, list[Row]] = {
        "journal_event": [
            {**common, "seq": seq, "at_ms": seq, "kind": kind, "member_id": member}
            for seq, (kind, member) in kinds.items()
        ],
        "journal_member": [{**common, "seq": seq, "at_ms": seq, "member_id": member} for seq, member in named.items()],
    }
    found = presence(journal_of(spark, tables)).collect()
    assert sorted((row.rebalance, row.owner) for row in found) == [
        (1, "a"), (1, "b"), (2, "a"), (3, "a"), (3, "b"), (4, "b"),
    ]  # fmt: skip


class _Page(HTMLParser):
    """An HTML parser that checks that every opened tag is closed, and collects the URLs that a browser would fetch."""

    VOID = frozenset({"meta", "rect", "line"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.charts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_what_people_see(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, truths = journal(21, groups=2)
    # A client may send any text. The text must not become markup.
    hostile = "<script>alert(1)</script>"
    for table in rows.values():
        for row in table:
            if row["group_id"] == "group-1":
                row["group_id"] = hostile
    tables = write_tables(analyze(journal_of(spark, rows), Thresholds()), tmp_path, Progress("analyze"), Stop())
    found = findings(tables, Thresholds())
    kinds = {finding.kind for finding in found if finding.group_id == "group-0"}
    assert kinds >= {"storm", "duplicates", "processed", "skipped", "forced", "rebalances", "needless_moves"}
    assert not [finding for finding in found if finding.severity == "violation"]
    storm = next(finding for finding in found if (finding.kind, finding.group_id) == ("storm", "group-0"))
    assert storm.numbers["rebalances"] == truths["group-0"].storms[0][1]
    assert f"rebalanced {storm.numbers['rebalances']} times" in storm.says
    json.dumps([finding.as_dict() for finding in found])

    data = report_data(tables, found)
    write_page(tmp_path / "report.html", data)
    text = (tmp_path / "report.html").read_text()
    page = _Page(text)
    assert page.open == []
    assert page.fetched == []
    assert page.charts == 8
    assert "<script" not in text
    assert not re.search(r"url\(|@import", text)
    pictures = write_pictures(tmp_path, data)
    assert len(pictures) == 8
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)

    assert _tell(found, Progress("analyze")) == 0
    broken = Finding("violation", "two_owners", "g", "The rule two_owners is broken.", {})
    assert _tell([broken], Progress("analyze")) == RULES_BROKEN
    assert "two_owners is broken" in capsys.readouterr().out


def test_what_only_members_logs_know_of_a_move_is_drawn(tmp_path: Path) -> None:
    move = {"topic": "t", "partition": 0, "source_member_id": "a", "target_member_id": "b", "move_seq": 1,
            "duplicates_min": 0, "duplicates_max": None, "skipped": 0, "duplicates": 7, "gap_records": 0}  # fmt: skip
    group = GroupData("g", 0, 1_000, moves=[move])
    assert '<rect class="c0"' in costs(group)
    assert costs_of(group.moves) == [("duplicates", "twice, say members' logs")]
    data = ReportData([], dict.fromkeys(("groups", "members", "rebalances", "moves", "duplicates"), 0), [group], 0)
    assert [path.name for path in write_pictures(tmp_path, data)] == ["moves-1-g.png"]
    write_page(tmp_path / "report.html", data)
    assert "twice, say members" in (tmp_path / "report.html").read_text()


def test_names_are_drawn_as_they_are_and_not_as_formulas(tmp_path: Path) -> None:
    name = r"$\no formula$"
    group = GroupData(name, 0, 1_000, partitions=["t-0"], members=[name], stretches=[Stretch(0, 0, 0, 1_000)])
    data = ReportData([], {}, [group], 0)
    assert [path.name for path in write_pictures(tmp_path, data)] == ["ownership-1-_no_formula_.png"]


def test_a_page_without_a_journal(spark: SparkSession, tmp_path: Path) -> None:
    rows, truths = journal(22, groups=1)
    turns = delivered(frame(spark, DELIVERY, rows["delivery"])).cache()
    data = delivery_data(turns, [])
    assert data.totals["duplicates_min"] == truths["group-0"].duplicates
    write_page(tmp_path / "report.html", data)
    page = _Page((tmp_path / "report.html").read_text())
    assert (page.open, page.fetched, page.charts) == ([], [], 2)
    assert "there is no journal" in (tmp_path / "report.html").read_text()


def test_the_report_of_members_logs_counts_what_it_does_not_draw(spark: SparkSession) -> None:
    quiet = [(f"a-{number:02}", "t", 0, "a", 0, 0, 9) for number in range(MOST_OF_A_KIND)]
    # Two members take turns, and each repeats the last record of the other.
    turns = [("z", "t", 0, "ab"[turn % 2], turn, turn, turn + 1) for turn in range(MOST_INTERVALS + 10)]
    rows = delivered(spark.createDataFrame([*quiet, *turns], DELIVERY)).cache()
    found = delivery_findings(rows)
    data = delivery_data(rows, found)
    moves = len(turns) - 1
    assert found[0].group_id == data.groups[0].group_id == "z"
    assert found[0].numbers["duplicates"] == moves
    totals = {"groups": len(quiet) + 1, "members": len(quiet) + 2, "moves": moves, "duplicates_min": moves}
    assert {name: data.totals[name] for name in totals} == totals
    assert (len(data.groups), data.groups_left_out) == (MOST_GROUPS, len(quiet) + 1 - MOST_GROUPS)
    assert data.groups[0].left_out == [f"ownership after the first {MOST_INTERVALS:,} stretches"]
