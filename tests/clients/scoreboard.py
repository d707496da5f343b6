"""A record of what the consumers of one test saw, with waits for a settled state.

The one idea: every consumer, of any library, reports assignments and deliveries to one `Scoreboard`. Tests wait on its
condition for a settled state of *all* consumers and then assert. So no test looks at an intermediate state, and none
sleeps.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivery:
    member: str
    partition: int
    offset: int
    value: bytes


class Scoreboard:
    """Ownership and deliveries of one topic, safe for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.owned: dict[str, frozenset[int]] = {}
        self.deliveries: list[Delivery] = []
        self.revoked: list[tuple[str, frozenset[int]]] = []
        self.lost: list[tuple[str, frozenset[int]]] = []
        self.failures: list[str] = []

    def assign(self, member: str, partitions: set[int] | frozenset[int]) -> None:
        with self._changed:
            self.owned[member] = frozenset(partitions)
            self._changed.notify_all()

    def add(self, member: str, partitions: set[int]) -> None:
        with self._changed:
            self.owned[member] = self.owned.get(member, frozenset()) | partitions
            self._changed.notify_all()

    def remove(self, member: str, partitions: set[int]) -> None:
        with self._changed:
            self.owned[member] = self.owned.get(member, frozenset()) - partitions
            self.revoked.append((member, frozenset(partitions)))
            self._changed.notify_all()

    def lose(self, member: str, partitions: set[int]) -> None:
        """Record partitions that a member lost without a chance to commit. A test calls this only after a real
        eviction.
        """
        with self._changed:
            self.owned[member] = self.owned.get(member, frozenset()) - partitions
            self.lost.append((member, frozenset(partitions)))
            self._changed.notify_all()

    def gone(self, member: str) -> None:
        with self._changed:
            self.owned.pop(member, None)
            self._changed.notify_all()

    def deliver(self, delivery: Delivery) -> None:
        with self._changed:
            self.deliveries.append(delivery)
            self._changed.notify_all()

    def fail(self, member: str, error: BaseException) -> None:
        with self._changed:
            self.failures.append(f"{member}: {error!r}")
            self._changed.notify_all()

    def wait_for(self, predicate: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self.failures) or predicate(), timeout_s):
                raise AssertionError(
                    f"{what}: not within {timeout_s} s; owned: {self.owned}; {len(self.deliveries)} records"
                )
            assert not self.failures, self.failures

    def wait_settled(self, members: set[str], partitions: int, timeout_s: float = 60) -> None:
        """Wait until every partition has exactly one owner, all `members` own a balanced share, and no other member
        owns a partition.
        """
        low, high = partitions // len(members), -(-partitions // len(members))

        def settled() -> bool:
            if set(self.owned) != members:
                return False
            owners = Counter(partition for owned in self.owned.values() for partition in owned)
            return (
                set(owners.values()) == {1}
                and len(owners) == partitions
                and all(low <= len(owned) <= high for owned in self.owned.values())
            )

        self.wait_for(settled, f"{partitions} partitions settled over {sorted(members)}", timeout_s)

    def wait_values(self, values: set[bytes], timeout_s: float = 60) -> None:
        self.wait_for(
            lambda: values <= {delivery.value for delivery in self.deliveries}, f"{len(values)} values", timeout_s
        )

    def revoked_of(self, member: str) -> frozenset[int]:
        """Return all partitions that the member was ever asked to revoke."""
        return frozenset().union(*(partitions for name, partitions in self.revoked if name == member))

    def duplicates(self) -> list[tuple[int, int]]:
        seen = Counter((delivery.partition, delivery.offset) for delivery in self.deliveries)
        return sorted(position for position, count in seen.items() if count > 1)


class Ownership(Scoreboard):
    """Records each partition that a member receives while another member owns it, or although the member itself already
    owns it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.overlaps: list[tuple[int, str, str]] = []
        self.repeated: list[tuple[str, frozenset[int]]] = []

    def assign(self, member: str, partitions: set[int] | frozenset[int]) -> None:
        with self._changed:
            self._look(member, partitions)
            super().assign(member, partitions)

    def add(self, member: str, partitions: set[int]) -> None:
        with self._changed:
            again = self.owned.get(member, frozenset[int]()) & partitions
            if again:
                self.repeated.append((member, again))
            self._look(member, partitions)
            super().add(member, partitions)

    def _look(self, member: str, partitions: set[int] | frozenset[int]) -> None:
        for other, owned in self.owned.items():
            self.overlaps += [(each, other, member) for each in owned & partitions if other != member]


class ConsumerThread(threading.Thread, ABC):
    """A consumer that polls until a test stops it, then closes in an orderly way (LeaveGroup included)."""

    def __init__(self, name: str, board: Scoreboard) -> None:
        super().__init__(name=name, daemon=True)
        self.board = board
        self._stop_requested = threading.Event()

    def run(self) -> None:
        try:
            self.open()
            try:
                while not self._stop_requested.is_set():
                    self.poll_once()
            finally:
                self.close_consumer()
        # This is the thread's outermost function, so it must pass any exception to the scoreboard.
        except Exception as error:
            self.board.fail(self.name, error)
        finally:
            self.board.gone(self.name)

    @property
    def stopping(self) -> bool:
        return self._stop_requested.is_set()

    def stop(self, timeout_s: float = 30) -> None:
        self._stop_requested.set()
        self.join(timeout_s)
        assert not self.is_alive(), f"{self.name} did not close in {timeout_s} s"

    @abstractmethod
    def open(self) -> None:
        """Create the consumer and subscribe."""

    @abstractmethod
    def poll_once(self) -> None:
        """Wait a moment for records, and report those that arrived."""

    @abstractmethod
    def close_consumer(self) -> None:
        """Leave the group and close."""
