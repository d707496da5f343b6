"""Receive what other nodes announce, on a connection of its own.

The one idea: a notification is a hint. It may be late or lost, for example while the connection was down. So every user
of it also looks by itself now and then, and is informed when listening begins and ends. A connection that only listens
would never notice that its server is gone, so it is asked a question regularly, within a time limit.

Sending is an ordinary statement (`pg_notify`), outside the transactions that clients wait for, because Postgres
serialises the commits of transactions that notify.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from storage.pool import APPLICATION_NAME, Database, connect, translated_errors
from storage.queries import statement
from storage.schema import SEARCH_PATH
from storage.types import NodeId

REVISIONS = "sluice_revision"
"""Channel for committed changes of the catalog. The payload is the revision."""
NODES = "sluice_nodes"
"""Channel for nodes that start, stop, or release leases."""
FOLLOWED = "sluice_followed"
"""Channel for clients that read an internal topic. The payload is its name; see `gateway/internal_log/writer.py`."""
LOOKS = "sluice_look"
"""Channel by which a console requests the metrics of all nodes; see `gateway/cluster/figures.py`."""
FIGURES = "sluice_figures"
"""Channel for the metrics of a node."""
APPENDS = "sluice_append"
"""Channel for appended records; see `gateway/cluster/wakeups.py`."""

PING_INTERVAL_S = 2.0
TIMEOUT_S = 5

Heard = Callable[[str], None]


class Listener:
    """Call `listen` repeatedly: each call receives until the connection is lost."""

    def __init__(
        self, database: Database, heard: Mapping[str, Heard], node_id: Callable[[], NodeId | None] = lambda: None
    ) -> None:
        """`heard` maps each channel to a function of the payload, which is called on the event loop and must not
        raise. While the connection lives it represents the process of `node_id`: another process that would take its
        number is refused."""
        self._database = database
        self._node_id = node_id
        self._heard = dict(heard)

    async def listen(self, begun: Callable[[], None], ended: Callable[[], None]) -> None:
        """Receive until the connection is lost, the node has another id, or the task is cancelled. `begun` is called
        once every later notification is received, `ended` once some may be missed. Raise StorageError if listening
        could not begin or has ended."""
        async with translated_errors():
            connection = await connect(
                self._database.url,
                {"application_name": f"{APPLICATION_NAME} listener", "search_path": SEARCH_PATH},
                timeout=TIMEOUT_S,
                command_timeout=TIMEOUT_S,
            )
        hearing, lost = False, asyncio.Event()

        def terminated(_connection: object) -> None:
            lost.set()

        connection.add_termination_listener(terminated)
        try:
            async with translated_errors():
                history = await self._database.admit(connection)
                node_id = self._node_id()
                if node_id is not None:
                    await connection.fetch(statement("stand_for_node"), node_id)
                for channel, heard in self._heard.items():
                    await connection.add_listener(channel, _handler(heard))
                hearing = True
                begun()
                while self._node_id() == node_id:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(lost.wait(), PING_INTERVAL_S)
                    # After a failover the former server may still answer, and no other node notifies it.
                    self._database.guard.require(history)
                    await connection.execute("select 1")
        finally:
            if hearing:
                ended()
            connection.terminate()


def _handler(heard: Heard) -> Callable[[object, int, str, str], None]:
    def handle(_connection: object, _pid: int, _channel: str, payload: str) -> None:
        heard(payload)

    return handle
