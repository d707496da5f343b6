"""`sluice topics add-partitions`, `alter`, `configs`, `delete-records` and `sluice cluster info` with a gateway."""

from __future__ import annotations

import pytest

from tests.commands.terminal import Prompt, produce
from tests.commands.terminal import sluice as sluice
from tests.commands.terminal import topic as topic
from tests.gateway_process import GatewayProcess


def test_partitions_are_added_up_to_the_given_number(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    assert sluice.json("topics", "add-partitions", topic, "--to", "5") == [
        {"topic": topic, "before": 2, "partitions": 5}
    ]
    produce(gateway, topic, 4, ["new"])
    (described,) = sluice.json("topics", "describe", topic)
    assert [row["log_end"] for row in described["partitions"]] == [0, 0, 0, 0, 1]
    for fewer in ("5", "1"):
        said = sluice("topics", "add-partitions", topic, "--to", fewer, code=1)
        assert said == f"sluice: topic {topic} has 5 partitions: --to wants a higher number\n"


def test_alter_sets_and_deletes_settings_and_keeps_the_others(sluice: Prompt, topic: str) -> None:
    changed = sluice.json("topics", "alter", topic, "--set", "cleanup.policy=compact", "--set", "retention.bytes=4096")
    assert [(row["name"], row["value"], row["source"]) for row in changed] == [
        ("cleanup.policy", "compact", "topic"),
        ("retention.bytes", "4096", "topic"),
    ]
    (back,) = sluice.json("topics", "alter", topic, "--delete", "cleanup.policy")
    assert (back["value"], back["source"]) == ("delete", "default")
    (described,) = sluice.json("topics", "describe", topic)
    assert described["configs"] == {"retention.bytes": "4096", "retention.ms": "3600000"}


def test_a_refused_alter_changes_nothing(sluice: Prompt, topic: str) -> None:
    assert "retention.ms" in sluice("topics", "alter", topic, "--set", "retention.ms=soon", code=1)
    assert "nothing to change" in sluice("topics", "alter", topic, code=1)
    both = sluice("topics", "alter", topic, "--set", "retention.ms=1", "--delete", "retention.ms", code=1)
    assert both == "sluice: retention.ms: give either --set or --delete\n"
    assert "write KEY=VALUE" in sluice("topics", "alter", topic, "--set", "retention.ms", code=1)
    (described,) = sluice.json("topics", "describe", topic)
    assert described["configs"] == {"retention.ms": "3600000"}


def test_configs_show_every_setting_with_its_source(sluice: Prompt, topic: str) -> None:
    rows = {row["name"]: row for row in sluice.json("topics", "configs", topic)}
    assert (rows["retention.ms"]["value"], rows["retention.ms"]["source"]) == ("3600000", "topic")
    assert (rows["cleanup.policy"]["value"], rows["cleanup.policy"]["source"]) == ("delete", "default")
    head, *lines = sluice("topics", "configs", topic).splitlines()
    assert head.split() == ["NAME", "VALUE", "SOURCE"]
    assert len(lines) == len(rows)


def test_records_before_an_offset_are_deleted(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    produce(gateway, topic, 1, ["a", "b", "c"])
    delete = ("topics", "delete-records", topic, "--partition", "1", "--before")
    assert sluice.json(*delete, "2") == [{"topic": topic, "partition": 1, "log_start": 2}]
    (line,) = sluice("topics", "tail", topic, "--from-beginning").splitlines()
    assert line.endswith("k2  c")
    refused = sluice(*delete, "9", code=1)
    assert refused == f"sluice: {topic}[1] ends before offset 9: `sluice topics describe` shows its offsets\n"
    assert "give an offset from 0 on" in sluice(*delete, "soon", code=1)
    assert sluice.json(*delete, "end")[0]["log_start"] == 3
    absent = sluice("topics", "delete-records", topic, "--partition", "2", "--before", "0", code=1)
    assert absent == f"sluice: topic {topic} has partitions 0 to 1\n"


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("add-partitions", ["--to", "9"]),
        ("alter", ["--set", "retention.ms=1"]),
        ("configs", []),
        ("delete-records", ["--partition", "0", "--before", "0"]),
    ],
)
def test_a_change_of_a_mistyped_topic_is_answered_with_the_nearest_names(
    sluice: Prompt, topic: str, verb: str, more: list[str]
) -> None:
    mistyped = topic.replace("orders", "order")
    said = sluice("topics", verb, mistyped, *more, code=1)
    assert said.startswith(f"sluice: there is no topic {mistyped}; did you mean ")
    assert topic in said


def test_cluster_info_shows_the_id_the_controller_and_the_nodes(sluice: Prompt, gateway: GatewayProcess) -> None:
    (info,) = sluice.json("cluster", "info")
    (node,) = info["nodes"]
    assert len(info["id"]) == 22
    assert (node["node"], node["controller"]) == (info["controller"], True)
    assert f"{node['host']}:{node['port']}" == gateway.bootstrap
    lines = sluice("cluster", "info").splitlines()
    assert lines[0].split() == ["ID", "CONTROLLER"]
    assert lines[1].split() == [info["id"], str(info["controller"])]
    assert lines[3].split() == ["NODE", "HOST", "PORT", "RACK", "CONTROLLER"]
