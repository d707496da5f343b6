"""Applications whose members are replaced one by one, while records flow."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka.admin import AdminClient

from tests.clients.consumers import CONSUMERS
from tests.clients.feeds import PARTITIONS, Feed
from tests.clients.scoreboard import ConsumerThread, Scoreboard
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess


class Rolling:
    """An application of a few members that are replaced in turn."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.topic = create_topic(gateway.bootstrap, PARTITIONS)
        self.group = f"g-{uuid.uuid4().hex[:8]}"
        self.board = Scoreboard()
        self.feed = Feed(gateway.bootstrap, self.topic)
        self.members: list[ConsumerThread] = []
        self._started = 0

    def start(self, kind: str, instance: str | None = None) -> ConsumerThread:
        client, assignor = CONSUMERS[kind]
        self._started += 1
        given = (f"{kind}-{self._started}", self.board, self.gateway.bootstrap, self.topic, self.group, assignor)
        member = client(*given) if instance is None else client(*given, {"group.instance.id": instance})
        self.members.append(member)
        member.start()
        return member

    def settle(self) -> None:
        self.board.wait_settled({member.name for member in self.members}, PARTITIONS)

    def replace(self, kind: str) -> None:
        """Stop the member that has run longest and start a member of `kind`, while the others read."""
        self.members.pop(0).stop()
        self.start(kind)
        self.settle()

    def type_of_group(self) -> str:
        admin = AdminClient({"bootstrap.servers": self.gateway.bootstrap})
        listed = admin.list_consumer_groups(request_timeout=10).result().valid
        return next(group.type.name.lower() for group in listed if group.group_id == self.group)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Produce records throughout; afterwards each must have been read exactly once."""
        over = threading.Event()
        failures: list[BaseException] = []

        def produce() -> None:
            try:
                while not over.is_set():
                    self.feed.send(20)
                    over.wait(0.02)
            except BaseException as error:
                failures.append(error)

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        try:
            yield
            over.set()
            producer.join(30)
            self.board.wait_values(self.feed.values)
        finally:
            over.set()
            for member in self.members:
                member.stop()
        assert not failures
        assert not self.board.failures
        assert self.board.duplicates() == []
        assert self.board.lost == []
