"""Iggy's scenarios of a handoff, with stock consumers: who comes, leaves or says nothing while others wait."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # pyright: ignore[reportPrivateImportUsage]

from tests.clients.workers import KINDS, PARTITIONS, QUICK, Stage, counted, until
from tests.gateway_process import GatewayFactory


@pytest.mark.parametrize("kind", ["eager", "consumer"])
def test_a_source_that_commits_nothing_is_waited_for_as_long_as_is_set(
    gateway_factory: GatewayFactory, kind: str
) -> None:
    """Iggy's 15; 24 of the acceptance list."""
    stage = Stage(gateway_factory(QUICK), kind, group_handoff_timeout_ms="3000")
    try:
        stage.read_everything()
        stage.start("second")
        stage.board.wait_settled({"first", "second"}, PARTITIONS)
        until(lambda: counted(stage.gateway, "group_handoffs_forced_total")[""] >= 2, "nothing was forced")
        assert "timeout" in stage.ends()
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_leaves_is_not_waited_for(gateway_factory: GatewayFactory, kind: str) -> None:
    """Iggy's 21."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        first = stage.read_everything()
        stage.start("second")
        stage.wait_pending(2.0)
        first.thread.stop()
        stage.board.wait_settled({"second"}, PARTITIONS)
        assert counted(stage.gateway, "group_handoffs_forced_total") == {"": 0.0}
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_leaves_gives_its_place_back(gateway_factory: GatewayFactory, kind: str) -> None:
    """Iggy's 24 and 26: the one that comes in its place waits for the same."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        first = stage.read_everything()
        second = stage.start("second")
        stage.wait_pending(2.0)
        second.thread.stop()
        stage.board.wait_settled({"first"}, PARTITIONS)
        stage.start("third")
        stage.wait_pending(2.0)
        first.finish()
        stage.board.wait_settled({"first", "third"}, PARTITIONS)
        assert counted(stage.gateway, "group_handoffs_forced_total") == {"": 0.0}
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_never_read_goes_at_once(gateway_factory: GatewayFactory, kind: str) -> None:
    """Iggy's 20: there are no records."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        stage.start("first")
        stage.board.wait_settled({"first"}, PARTITIONS)
        stage.start("second")
        stage.board.wait_settled({"first", "second"}, PARTITIONS)
        stage.start("third")
        stage.board.wait_settled({"first", "second", "third"}, PARTITIONS)
        assert counted(stage.gateway, "group_handoffs_forced_total") == {"": 0.0}
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", ["cooperative", "consumer"])
def test_four_to_two_to_four_over_sixteen_partitions(gateway_factory: GatewayFactory, kind: str) -> None:
    """Iggy's 33; with interval checks of ownership."""
    stage = Stage(gateway_factory(QUICK), kind, partitions=16)
    try:
        for name in "abcd":
            stage.start(name)
        stage.board.wait_settled(set("abcd"), 16)
        for name in "cd":
            stage.workers[name].thread.stop()
        stage.board.wait_settled(set("ab"), 16)
        for name in "ef":
            stage.start(name)
        stage.board.wait_settled(set("abef"), 16)
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", ["cooperative", "consumer"])
def test_partitions_that_come_while_others_are_waited_for(gateway_factory: GatewayFactory, kind: str) -> None:
    """Iggy's 14; 32 of the acceptance list."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        first = stage.read_everything()
        stage.start("second")
        stage.wait_pending(2.0)
        admin = AdminClient({"bootstrap.servers": stage.gateway.bootstrap})
        admin.create_partitions([NewPartitions(stage.topic, 8)])[stage.topic].result(30)
        first.finish()
        stage.board.wait_settled({"first", "second"}, 8)
        assert not stage.board.duplicates()
    finally:
        stage.stop()
