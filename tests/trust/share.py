"""A share group (KIP-932) as a workload. Its members are Java clients, because no other stock client here has share
consumers.
"""

# The type stubs of these clients declare only a part of their API.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Sequence

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.trust.history import Delivered, History, Outcome, Produced, Settled, Settlement, number_in
from tests.trust.java import Java
from tests.trust.patience import CALL_S, FINISH_S, LEAVE_S, PATIENT, WorkloadError
from tests.trust.workloads import Workload, insist

DELIVERY_LIMIT = 5
"""group.share.delivery.count.limit: Kafka's default, which the nodes keep."""
QUIET_S = 5.0


class ShareGroup(Workload):
    """A share group whose members join and leave. A member acknowledges the records of a poll before it polls again."""

    def __init__(self, history: History, java: Java, bootstrap: str, topic: str, *, members: int, seed: int) -> None:
        self.group = f"share-{uuid.uuid4().hex[:6]}"
        super().__init__(self.group)
        self.topic = topic
        self._history, self._java, self._bootstrap = history, java, bootstrap
        self._chance = random.Random(seed)
        self._draining = threading.Event()
        insist(lambda: _from_the_beginning(bootstrap, self.group))
        for number in range(members):
            self._thread(lambda number=number: self._consume(number), f"{self.group}-m{number}")

    def drain(self) -> None:
        """Let members stay in the group from now on, until `stop`."""
        self._draining.set()

    def _consume(self, number: int) -> None:
        count = 0
        while not self._stopping.is_set():
            ends_s = time.monotonic() + self._chance.uniform(5, 30)
            self._live(
                f"m{number}.{count}",
                lambda ends_s=ends_s: (
                    self._stopping.is_set() or (not self._draining.is_set() and time.monotonic() > ends_s)
                ),
            )
            count += 1

    def look_again(self, partitions: int) -> None:
        """Append a record to each partition, and let one more member read until it has received these records, and none
        for QUIET_S. The history then has its deliveries. If there were no new records, a group that has stopped would
        look like one with nothing to deliver.
        """
        sent = self._send_last(partitions)
        began_s = time.monotonic()

        def quiet() -> bool:
            delivered = self._history.of(Delivered)
            came = sent <= {each.value for each in delivered} or time.monotonic() > began_s + FINISH_S
            last_s = max((each.at_s for each in delivered), default=began_s)
            return came and time.monotonic() > max(last_s, began_s) + QUIET_S

        self._live("last", quiet)

    def _send_last(self, partitions: int) -> set[int]:
        """Append a record with a new value to each partition. Return the values."""
        producer = Producer({"bootstrap.servers": self._bootstrap, "enable.idempotence": True, **PATIENT})
        first = 1 + max((each.value for each in self._history.of(Produced)), default=0)
        invoked_s = time.monotonic()

        def heard(error: KafkaError | None, message: Message) -> None:
            partition, offset, value = message.partition(), message.offset(), message.value()
            assert partition is not None
            outcome = Outcome.UNKNOWN if error is not None or offset is None else Outcome.OK
            place = ("last", self.topic, partition, None, number_in(value), invoked_s, time.monotonic(), outcome)
            self._history.add(Produced(*place, -1 if offset is None else offset))

        for index in range(partitions):
            producer.produce(self.topic, str(first + index), partition=index, on_delivery=heard)
        if producer.flush(FINISH_S):
            raise WorkloadError(f"{self.topic}: the last records were never answered")
        return set(range(first, first + partitions))

    def _live(self, name: str, ended: object) -> None:
        assert callable(ended)
        client = self._java.start(
            *("sharer", name, self.group, self.topic, self._chance.randrange(2**31)),
            on_event=lambda event: self._heard(name, event),
        )
        while not ended() and not client.wait(0.1):
            pass
        client.stop()
        if not client.wait(LEAVE_S):
            raise WorkloadError(f"member {name} of {self.group} does not end")

    def _heard(self, member: str, event: Sequence[str]) -> None:
        kind, _, partition, offset, *values = event
        place = (self.group, member, self.topic, int(partition), int(offset))
        if kind == "delivered":
            value, count, at_s = values
            self._history.add(Delivered(*place, number_in(value), int(count), float(at_s)))
            return
        count, settlement, invoked_s, completed_s, outcome = values
        self._history.add(
            Settled(
                *(*place, int(count), Settlement(settlement), float(invoked_s), float(completed_s)), Outcome(outcome)
            )
        )


def _from_the_beginning(bootstrap: str, group: str) -> None:
    """Let the group begin at the first record. By default a share group begins at the end."""
    entry = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap, **PATIENT})
    admin.incremental_alter_configs([resource], request_timeout=CALL_S)[resource].result(CALL_S * 2)
