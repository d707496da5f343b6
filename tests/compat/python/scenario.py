"""One run of one scenario: its names, delivery log, members and feed, and their end."""

from __future__ import annotations

import contextlib
import os
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from tests.compat.python.child import Child
from tests.compat.python.client import Client, Member, MemberOptions, Producer, Record
from tests.compat.python.journal import Journal, Partition, View

CONTROL_SECONDS = 90.0
FEED_INTERVAL_SECONDS = 0.02
END_SECONDS = 10.0

Body = Callable[["Run"], None]
SCENARIOS: dict[str, Body] = {}


class Closeable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closeable)
AnyChild = TypeVar("AnyChild", bound=Child)


def scenario(name: str) -> Callable[[Body], Body]:
    """Register a scenario. It passes if it returns, fails if it raises, and is skipped if it raises
    `UnsupportedError`."""

    def register(body: Body) -> Body:
        SCENARIOS[name] = body
        return body

    return register


class Feed(threading.Thread):
    """Produces a record to each partition again and again, and records each acknowledgement."""

    def __init__(
        self, producer: Producer, topic: str, partitions: Sequence[int], journal: Journal, *, outage: bool
    ) -> None:
        super().__init__(daemon=True)
        self._producer, self._topic, self._journal, self._outage = producer, topic, journal, outage
        self._partitions = list(partitions)
        self._stopped = threading.Event()
        self._flowing = threading.Event()
        self._flowing.set()
        self._in_hand = threading.Lock()
        self._error: Exception | None = None
        self._count = 0

    def run(self) -> None:
        while not self._stopped.wait(FEED_INTERVAL_SECONDS):
            self._flowing.wait()
            try:
                with self._in_hand:
                    if self._flowing.is_set():
                        self.round()
            except Exception as error:  # During an outage each library raises errors of its own.
                if not self._outage:
                    self._error = error
                    return

    def round(self) -> None:
        self._count += 1
        records = [(partition, Record(str(self._count).encode())) for partition in self._partitions]
        offsets = self._producer.send(self._topic, records)
        for partition, offset in zip(self._partitions, offsets, strict=True):
            self._journal.produced(self._topic, partition, offset)

    def pause(self) -> None:
        """Stop sending until `resume`."""
        self._flowing.clear()
        with self._in_hand:
            pass

    def resume(self) -> None:
        self._flowing.set()

    def end(self) -> None:
        self._stopped.set()
        self._flowing.set()
        self.join(END_SECONDS)

    def stop(self) -> None:
        """End after the current round, and raise the error that ended the feed, if any."""
        self._stopped.set()
        self._flowing.set()
        self.join(CONTROL_SECONDS)
        assert not self.is_alive(), "the producer hangs"
        if self._error is not None:
            raise AssertionError(f"the producer failed: {self._error!r}") from self._error


class Run:
    """The helpers of one scenario. `end` stops everything that the scenario left running."""

    def __init__(self, name: str, suite: str, program: str, client: Client, deliveries: Path, control: str) -> None:
        self.name, self.client, self._program = name, client, program
        self._path = deliveries / f"{suite}.{name}.jsonl"
        self._control = control
        self._stack = contextlib.ExitStack()
        self._members: list[Member] = []
        self._journal: Journal | None = None
        self.view: View | None = None
        self.detail = ""

    def topic(self, partitions: int, prefix: str = "t") -> str:
        """Create a fresh topic."""
        name = f"{prefix}-{uuid.uuid4().hex[:10]}"
        self.client.create_topic(name, partitions)
        return name

    def group(self) -> str:
        return f"g-{uuid.uuid4().hex[:10]}"

    @contextlib.contextmanager
    def closing(self, thing: T) -> Iterator[T]:
        try:
            yield thing
        finally:
            thing.close()

    def journal(
        self, topic: str, partitions: int, *, cooperative: bool = False, redelivery_allowed: bool = False
    ) -> tuple[Journal, View]:
        self._journal = Journal(self._path)
        self._stack.callback(self._journal.close)
        self._journal.scenario(topic, partitions, cooperative=cooperative, redelivery_allowed=redelivery_allowed)
        self.view = View(self._path)
        return self._journal, self.view

    def start(self, options: MemberOptions) -> Member:
        """Start a member on a thread. If the member fails, the next wait fails."""
        assert self._journal is not None
        assert self.view is not None
        member = self.client.member(options, self._journal, self.view.failures)
        self._members.append(member)
        member.start()
        return member

    def spawn(self, options: MemberOptions) -> Child:
        """Start a member in a process of its own."""
        assert self._journal is not None
        assert self.view is not None
        return self.keep(self.client.spawn(self._program, options, self._journal, self.view.failures))

    def keep(self, child: AnyChild) -> AnyChild:
        """End this child process when the scenario ends."""
        self._stack.callback(child.end)
        return child

    def feed(self, topic: str, partitions: Sequence[int], *, outage: bool = False) -> Feed:
        """Start a feed. A scenario stops the feed before its last assertion."""
        assert self._journal is not None
        producer = self.client.producer()
        self._stack.callback(producer.close)
        feed = Feed(producer, topic, partitions, self._journal, outage=outage)
        self._stack.callback(feed.end)
        feed.start()
        return feed

    def produce(self, topic: str, partitions: Sequence[int], count: int) -> None:
        """Send `count` records to each partition, and wait until they are acknowledged."""
        assert self._journal is not None
        with self.closing(self.client.producer()) as producer:
            records = [(partition, Record(str(index).encode())) for index in range(count) for partition in partitions]
            for (partition, _), offset in zip(records, producer.send(topic, records), strict=True):
                self._journal.produced(topic, partition, offset)

    def requests(self, api: str, version: int) -> float | None:
        """Return how many requests of this version the gateway has answered since its start. Return None if the broker
        has no such metric.
        """
        if not os.environ["COMPAT_METRICS"]:
            return None
        with urllib.request.urlopen(os.environ["COMPAT_METRICS"], timeout=CONTROL_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        labels = (f'api="{api}"', f'version="{version}"')
        counted = (line for line in lines if line.startswith("sluice_requests_total{"))
        return sum(float(line.split()[-1]) for line in counted if all(label in line for label in labels))

    def restart_gateway(self) -> None:
        self._post("/restart")

    def kill_gateway(self) -> None:
        self._post("/kill")

    def _post(self, path: str) -> None:
        request = urllib.request.Request(self._control + path, method="POST")
        with urllib.request.urlopen(request, timeout=CONTROL_SECONDS) as answer:
            answer.read()

    def end(self) -> None:
        """Stop everything that the scenario left running."""
        for member in self._members:
            member.request_stop()
        for member in self._members:
            member.join(END_SECONDS)
        self._stack.close()

    def leave(self, members: Sequence[Member], feed: Feed) -> None:
        """Stop the members one by one. In the meantime records flow, unless the library loses
        records in such a stop.
        """
        assert self.view is not None
        if self.client.drops_when_stopped:
            feed.pause()
            self.view.wait_caught_up()
        for member in members:
            member.stop()
        feed.resume()


def all_of(topic: str, partitions: int) -> list[Partition]:
    return [(topic, partition) for partition in range(partitions)]
