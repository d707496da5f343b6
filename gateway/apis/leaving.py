"""When a member is told that it has left.

librdkafka closes a consumer in two steps that do not wait for each other: its application thread answers the rebalance
events that are still queued, its main thread leaves the group and ends when LeaveGroup is answered. Whoever answers an
event after that waits for ever (confluentinc/librdkafka#4884; in Python with the interpreter's lock held). A broker
that needs some milliseconds to let a member go hardly ever shows it.
The group goes on at once; only the answer is later. See decision 0012.
"""

from __future__ import annotations

import asyncio

ANSWERED_AFTER_S = 0.020


async def farewell() -> None:
    """Waits until a member that has left may be told so. The connection's later requests wait behind it."""
    await asyncio.sleep(ANSWERED_AFTER_S)
