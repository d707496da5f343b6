"""Figures of every node, for a person who opens one node's console.

The one idea: a node publishes nothing until a console asks. The question and the answers are notifications through
Postgres, so they touch no table, and every console hears every answer. A node that does not answer in time, such as one
of an earlier release, is shown without figures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

import structlog

from gateway.cluster.membership import Membership
from storage.errors import StorageError

logger = structlog.stdlib.get_logger(__name__)

Health = Callable[[], Sequence[tuple[str, str, float]]]
"""Returns metrics of this node: a metric's name, its label, and its value."""
Figures = Mapping[str, Mapping[str, float]]
"""Values of a node by metric, and by label within a metric."""

WAIT_S = 0.5
"""Longest time for which a console waits for other nodes' answers."""
PAUSE_S = 0.5
"""Shortest time between two answers of a node, and between two questions. Answers that were heard within it count."""
FRESH_S = 5.0
"""Age up to which an answer is shown, so that an answer that came too late is shown the next time."""
MAX_PAYLOAD_BYTES = 7_900
"""Maximal size of a payload in bytes. Postgres refuses notifications of 8,000 bytes."""
MAX_FIGURES = 500
MAX_VALUE = 1e300
"""An integer of a payload may exceed every float, and then cannot be converted to one."""


class NodeFigures:
    """The metrics of this node, and those that other nodes have sent recently."""

    def __init__(
        self,
        membership: Membership,
        health: Health,
        ask: Callable[[], Awaitable[None]],
        answer: Callable[[str], Awaitable[None]],
    ) -> None:
        """`ask` notifies all nodes that a console requests their metrics, and `answer` sends a payload to all nodes.
        Both raise StorageError.
        """
        self._membership, self._health = membership, health
        self._ask, self._answer = ask, answer
        self._heard: dict[int, tuple[float, Figures]] = {}
        self._arrived = asyncio.Event()
        self._asked_s = self._answered_s = float("-inf")
        self._answering: asyncio.Task[None] | None = None

    def own(self) -> Figures:
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for name, label, value in self._health():
            found[name.removeprefix("sluice_").removesuffix("_total")][label] = value
        return found

    async def of_all(self) -> Mapping[int, Figures]:
        """Return the figures of this node and of the live nodes that answer. Raise StorageError."""
        own_id = int(self._membership.node_id)
        others = {int(node.node_id) for node in self._membership.alive()} - {own_id}
        if others and time.monotonic() - self._asked_s >= PAUSE_S:
            self._asked_s = time.monotonic()
            await self._ask()
            await self._wait_for(others, self._asked_s)
        since_s = time.monotonic() - FRESH_S
        heard = {node_id: figures for node_id, (heard_s, figures) in self._heard.items() if heard_s >= since_s}
        return {**heard, own_id: self.own()}

    async def _wait_for(self, others: set[int], asked_s: float) -> None:
        # Older answers count, too: a node that has just answered another console does not answer again.
        since_s = asked_s - PAUSE_S
        try:
            async with asyncio.timeout(WAIT_S):
                while any(self._heard.get(node_id, (float("-inf"),))[0] < since_s for node_id in others):
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            logger.debug("some nodes sent no figures to the console", nodes=sorted(others - self._heard.keys()))

    def question_heard(self, _payload: str) -> None:
        """Answer a console's request for metrics."""
        if self._answering is None and time.monotonic() - self._answered_s >= PAUSE_S:
            self._answered_s = time.monotonic()
            self._answering = asyncio.create_task(self._send())
            self._answering.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._answering = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("figures for a console were not sent", exc_info=task.exception())

    async def _send(self) -> None:
        payload = written(int(self._membership.node_id), self.own())
        try:
            await self._answer(payload)
        except StorageError as error:
            logger.warning("figures for a console were not sent", error=str(error))

    def answer_heard(self, payload: str) -> None:
        """Keep the figures that a node has sent. Every role of the database can send such a payload, so it is checked.
        Only live nodes have an entry added, so the memory is bounded."""
        found = read(payload)
        if found is None:
            return
        node_id, figures = found
        if any(int(node.node_id) == node_id for node in self._membership.alive()):
            self._heard[node_id] = time.monotonic(), figures
            self._arrived.set()

    async def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)


def written(node_id: int, figures: Figures) -> str:
    """Return the payload of a node's figures. Figures of 0 are omitted if they do not all fit, then all figures."""
    rounded = {name: {label: round(value, 3) for label, value in by.items()} for name, by in figures.items()}
    nonzero = {name: {label: value for label, value in by.items() if value} for name, by in rounded.items()}
    for shown in (rounded, nonzero):
        payload = json.dumps([node_id, shown], separators=(",", ":"))
        if len(payload.encode()) <= MAX_PAYLOAD_BYTES:
            return payload
    return json.dumps([node_id, {}])


def read(payload: str) -> tuple[int, Figures] | None:
    """Return the node and the metrics in a payload. Return None if the payload has another form."""
    try:
        data: object = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, list) or len(found := cast("list[object]", data)) != 2:
        return None
    node_id, named = found
    if not isinstance(node_id, int) or not isinstance(named, dict):
        return None
    figures: dict[str, dict[str, float]] = {}
    count = 0
    for name, by in cast("dict[str, object]", named).items():
        if not isinstance(by, dict):
            return None
        for label, value in cast("dict[str, object]", by).items():
            count += 1
            if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_VALUE < value < MAX_VALUE:
                return None
            figures.setdefault(name, {})[label] = value
    return None if count > MAX_FIGURES else (node_id, figures)
