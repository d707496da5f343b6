"""The runner of Kafka's own tests: which tests it runs. Each test has an answer, even if its program ends early."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.security.scram import ScramMechanism, credential, salted_password
from tests.compat.upstream import kafka, outside
from tests.compat.upstream.kafka import AllowList, ChosenTests, Program, faults

FAKE = """
import json, sys, time
chosen = [line.split() for line in open(sys.argv[2])]
for name, *rows in chosen:
    for row in rows:
        print(json.dumps({"started": row}), flush=True)
        if row.endswith("hangs"):
            time.sleep(60)
        if row.endswith("crashes"):
            sys.exit(1)
        outcome = "failed" if row.endswith("fails") else "passed"
        print(json.dumps({"test": row, "outcome": outcome, "seconds": 1, "detail": "why"}), flush=True)
"""


def allowed(run: tuple[str, ...], left_out: dict[str, str]) -> AllowList:
    return AllowList((ChosenTests("4.2.0", "kafka.api.SomeTest", run),), left_out, {}, ())


def test_a_test_without_a_line_and_a_line_without_a_test_are_faults() -> None:
    found = {"kafka.api.SomeTest": {"one", "two", "three"}}
    assert faults(allowed(("one[classic]", "two"), {"SomeTest.three": "why"}), found) == []
    told = faults(allowed(("one",), {"SomeTest.four": "why"}), found)
    assert told == ["no reason for SomeTest.three, SomeTest.two", "no such test: SomeTest.four"]


def test_a_test_that_is_run_and_left_out_is_a_fault() -> None:
    """It would be answered twice, which fails the suite."""
    told = faults(allowed(("one",), {"SomeTest.one": "why"}), {"kafka.api.SomeTest": {"one"}})
    assert told == ["both run and left out: SomeTest.one"]


def test_no_test_is_both_run_and_left_out() -> None:
    listed = AllowList.load()
    assert not {f"{each.short}.{test}" for each in listed.classes for test in each.run} & set(listed.left_out)


def test_every_test_that_is_left_out_belongs_to_a_class_that_is_listed() -> None:
    listed = AllowList.load()
    assert {test.partition(".")[0] for test in listed.left_out} <= {tests.short for tests in listed.classes}


def test_every_test_has_one_answer_even_if_its_program_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "SILENCE_SECONDS", 1.0)
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    names = ("passes", "hangs", "fails", "later")
    Program([sys.executable, str(script)], "").run({f"T.{name}": f"a.T#{name}" for name in names}, None)
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["scenario"]: row["outcome"] for row in rows} == {
        "upstream.T.passes": "passed",
        "upstream.T.hangs": "failed",
        "upstream.T.fails": "failed",
        "upstream.T.later": "passed",
    }
    assert len(rows) == len(names)


def test_tests_whose_program_ends_too_early_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    Program([sys.executable, str(script)], "").run({"T.crashes": "a.T#crashes", "T.later": "a.T#later"}, None)
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["scenario"]: row["outcome"] for row in rows} == {
        "upstream.T.crashes": "failed",
        "upstream.T.later": "passed",
    }


def test_a_test_may_set_known_settings_but_no_addresses() -> None:
    asked = {
        "group.consumer.heartbeat.interval.ms": "100",
        "num.partitions": "3",
        "message.max.bytes": "many",
        "num.network.threads": "2",
        "listeners": "PLAINTEXT://localhost:0",
    }
    assert outside.served(asked) == {
        "group.consumer.heartbeat.interval.ms": "100",
        "group.consumer.min.heartbeat.interval.ms": "100",
        "num.partitions": "3",
        "num.network.threads": "2",
    }


def test_users_are_written_as_for_kafka_storage() -> None:
    made = outside.scram_user("SCRAM-SHA-512=[name=ann,password=a=b]")
    salted = salted_password(ScramMechanism.SHA_512, "a=b", made.salt, made.iterations)
    assert made == credential("ann", ScramMechanism.SHA_512, salted, made.salt, made.iterations)


def test_settings_of_one_listener_are_accepted() -> None:
    users = {"listener.name.sasl_plaintext.plain.sasl.jaas.config": "org.example.Login required;"}
    assert outside.served({**users, "sasl.enabled.mechanisms": "GSSAPI"}) == users


@pytest.mark.parametrize(("broker", "outcome"), [("sluice", "unserved"), ("kafka", "passed")])
def test_an_unserved_test_is_reported_as_such_and_asked_of_apache_kafka(
    broker: str, outcome: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = replace(
        allowed((), {"SomeTest.wants": "why", "SomeTest.inside": "why"}), unserved=frozenset({"SomeTest.wants"})
    )

    class Passes:
        def __init__(self, *_: object) -> None: ...

        def run(self, tests: dict[str, str], _: object) -> None:
            for row in tests:
                kafka.answer(row, "passed", 0.0, "")

    monkeypatch.setenv("COMPAT_BROKER", broker)
    monkeypatch.delenv("COMPAT_SCENARIOS", raising=False)
    monkeypatch.setattr(kafka, "Program", Passes)
    monkeypatch.setattr(kafka, "there", lambda *_: {"kafka.api.SomeTest": {"wants", "inside"}})
    monkeypatch.setattr(AllowList, "load", lambda: listed)
    kafka.run(Path())
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["scenario"].partition(".")[2]: row["outcome"] for row in rows} == {
        "allow-list": "passed",
        "SomeTest.wants": outcome,
        "SomeTest.inside": "skipped",
    }


def test_a_test_gets_the_nodes_listed_for_it_or_for_its_class() -> None:
    given = {"SomeTest": 2, "SomeTest.three": 3}
    asked = ("SomeTest.three", "SomeTest.other", "OtherTest.three")
    assert [outside.most_nodes(given, test) for test in asked] == [3, 2, 1]


def test_tests_share_brokers_only_if_all_their_requirements_are_equal() -> None:
    given = {"SomeTest.three": 3}
    maker = outside.Gateways(cast("Any", None), given, from_0=("SomeTest.zero",), roles=("SomeTest.roles",))
    tests = ("SomeTest.three", "SomeTest.zero", "SomeTest.roles", "SomeTest.one", "SomeTest.other")
    assert [maker.particulars(test) for test in tests] == [
        *((3, False, False), (1, True, False), (1, False, True)),
        *[(1, False, False)] * 2,
    ]
    brokers = outside.Brokers(maker, sharing=("SomeTest",))
    keys = [brokers.key_of({"test": test, "brokers": 3, "settings": {}}) for test in tests]
    assert len(set(keys)) == 4
    assert keys[3] == keys[4]
    assert brokers.key_of({"test": "OtherTest.three", "brokers": 3, "settings": {}}) is None


@pytest.mark.parametrize(
    ("asked", "with_roles", "places"),
    [
        ({"brokers": 3}, False, [(0, None), (1, None)]),
        ({"brokers": 1, "controllers": 3, "combined": False}, False, [(0, 0), (1, 1)]),
        ({"brokers": 2, "controllers": 1, "combined": False}, True, [(None, 0), (0, None), (1, None)]),
        ({"brokers": 1, "controllers": 2, "combined": True}, True, [(0, 0), (None, 1)]),
        ({"brokers": 2, "controllers": 1, "combined": True}, True, [(0, 0), (1, None)]),
    ],
)
def test_nodes_get_the_requested_roles_only_for_listed_tests(
    asked: dict[str, Any], *, with_roles: bool, places: list[tuple[int | None, int | None]]
) -> None:
    assert outside._places(asked, 2, with_roles=with_roles) == places  # noqa: SLF001 - what is started, and in what order


def test_shares_hold_each_test_once_and_whole_classes() -> None:
    chosen = {
        "4.0.1": {"A.x": "k.A#x", "A.y": "k.A#y", "B.x": "k.B#x"},
        "4.2.0": {"A.x[c]": "k.A#x", "C.x": "k.C#x", "C.y": "k.C#y", "C.z": "k.C#z"},
    }
    shares = kafka.shared_out(chosen, 2)
    held = [(version, row, name) for share in shares for version, tests in share.items() for row, name in tests.items()]
    assert sorted(held) == sorted((version, row, name) for version in chosen for row, name in chosen[version].items())
    assert [sum(map(len, share.values())) for share in shares] == [4, 3]
    homes = {
        (version, name.partition("#")[0], number)
        for number, share in enumerate(shares)
        for version, tests in share.items()
        for name in tests.values()
    }
    assert len(homes) == 4
