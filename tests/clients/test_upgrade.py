"""Two rolling bounces from range to cooperative-sticky under load (KIP-429), by stock clients.

The one idea: in the first bounce each member returns with both protocols, and is eager as long as it lists both. The
coordinator chooses range until the last member that lists only range has left. In the second bounce each member returns
with the cooperative protocol alone. librdkafka refuses to list both, so its member is present only before the first
bounce and after the second. kafka-python takes part in both bounces, with an assignor that works in both modes, as
Java's does.
"""

from __future__ import annotations

from typing import ClassVar

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient
from kafka.coordinator.assignors.abstract import (
    AbstractPartitionAssignor,
    RebalanceProtocol,  # pyright: ignore[reportAttributeAccessIssue]
)
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor

from tests.clients.consumers import KafkaPythonConsumer
from tests.clients.rolling import Rolling
from tests.clients.scoreboard import ConsumerThread, Ownership
from tests.clients.workers import counted
from tests.gateway_process import GatewayFactory, GatewayProcess

HALF_WAY = "mixed_mode"
BEFORE = ("confluent-range", "kafka-python-range", "confluent-range")
BOTH = "kafka-python-both"
AFTER = ("confluent-cooperative-sticky", "kafka-python-cooperative-sticky", "confluent-cooperative-sticky")


class EitherWay(CooperativeStickyAssignor):
    """An assignor that is eager while its consumer also lists an eager assignor. The member then revokes everything
    before it joins.
    """

    def supported_protocols(self) -> list[RebalanceProtocol]:
        return [RebalanceProtocol.COOPERATIVE, RebalanceProtocol.EAGER]

    def metadata(self, topics: set[str]) -> object:
        self.member_assignment = None
        return super().metadata(topics)


class BothConsumer(KafkaPythonConsumer):
    ASSIGNORS: ClassVar[dict[str, type[AbstractPartitionAssignor]]] = {
        **KafkaPythonConsumer.ASSIGNORS,
        "cooperative-sticky": EitherWay,
    }


class Upgrade(Rolling):
    board: Ownership

    def __init__(self, gateway: GatewayProcess) -> None:
        super().__init__(gateway)
        self.board = Ownership()
        self.admin = AdminClient({"bootstrap.servers": gateway.bootstrap})

    def start(self, kind: str, instance: str | None = None) -> ConsumerThread:
        if kind != BOTH:
            return super().start(kind, instance)
        self._started += 1
        member = BothConsumer(
            f"both-{self._started}",
            self.board,
            self.gateway.bootstrap,
            self.topic,
            self.group,
            "cooperative-sticky,range",
        )
        self.members.append(member)
        member.start()
        return member

    def read_more(self) -> None:
        """Wait until each present member has read a record produced from now on."""
        seen = len(self.board.deliveries)
        names = {member.name for member in self.members}
        self.board.wait_for(
            lambda: names <= {each.member for each in self.board.deliveries[seen:]}, "everybody reads on"
        )

    def protocol(self) -> str:
        return self.admin.describe_consumer_groups([self.group])[self.group].result(30).partition_assignor

    def violations(self) -> float:
        return counted(self.gateway, "group_protocol_violations_total").get(HALF_WAY, 0.0)

    def groups_half_way(self) -> float:
        """Return the gateway's number of groups in mixed mode: some members eager, some cooperative. The gateway has no
        other group.
        """
        return counted(self.gateway, "groups_mixed_mode")[""]


def test_librdkafka_refuses_to_list_both() -> None:
    """librdkafka refuses both. If a release accepts both, its member can take part in both bounces
    of the test below.
    """
    with pytest.raises(confluent_kafka.KafkaException, match="online migration"):
        confluent_kafka.Consumer({"group.id": "g", "partition.assignment.strategy": "cooperative-sticky,range"})


def test_two_bounces_from_range_to_cooperative_sticky_under_load(gateway_factory: GatewayFactory) -> None:
    upgrade = Upgrade(gateway_factory())
    with upgrade.load():
        for kind in BEFORE:
            upgrade.start(kind)
        upgrade.settle()
        assert (upgrade.protocol(), upgrade.violations(), upgrade.groups_half_way()) == ("range", 0, 0)
        for left in (2, 1, 0):
            upgrade.replace(BOTH)
            upgrade.read_more()
            assert upgrade.protocol() == ("range" if left else "cooperative-sticky")
            assert upgrade.violations() > 0
            assert upgrade.groups_half_way() == 1
        over = upgrade.violations()
        for left in (2, 1, 0):
            upgrade.replace(AFTER[2 - left])
            upgrade.read_more()
            assert upgrade.protocol() == "cooperative-sticky"
            assert upgrade.groups_half_way() == (1 if left else 0)
        assert upgrade.violations() == over
        upgrade.board.revoked.clear()
        before = dict(upgrade.board.owned)
        upgrade.start(AFTER[0])
        upgrade.settle()
        revoked = {member: upgrade.board.revoked_of(member) for member in before}
        kept = {member: owned & upgrade.board.owned[member] for member, owned in before.items()}
        assert all(not revoked[member] & kept[member] for member in before), "what is kept was revoked"
    assert upgrade.board.overlaps == []
