"""The delay before a leaving member is removed.

librdkafka closes a consumer in two steps that do not wait for each other. Its application thread answers the rebalance
events that are still queued. Its main thread leaves the group and ends when LeaveGroup is answered. If the application
thread answers an event after that, it waits for ever (confluentinc/librdkafka#4884; in Python with the interpreter's
lock held). A broker that needs some milliseconds to remove a member hardly ever shows it.

The removal and the answer are both delayed: no other member owns the partitions before the leaving client knows that it
has none. See decision 0012.
"""

from __future__ import annotations

import asyncio

LET_GO_AFTER_S = 0.020


async def delay_leave() -> None:
    """Wait until a leaving member may be removed. Later requests of the connection wait for this one. If the peer
    closes the connection in the meantime, the member leaves nevertheless.
    """
    await asyncio.sleep(LET_GO_AFTER_S)
