"""When a member that says that it leaves is let go.

librdkafka closes a consumer in two steps that do not wait for each other: its application thread answers the rebalance
events that are still queued, its main thread leaves the group and ends when LeaveGroup is answered. Whoever answers an
event after that waits for ever (confluentinc/librdkafka#4884; in Python with the interpreter's lock held). A broker
that needs some milliseconds to let a member go hardly ever shows it.
It is let go and told so at once, both later: nobody has its partitions before it knows. See decision 0012.
"""

from __future__ import annotations

import asyncio

LET_GO_AFTER_S = 0.020


async def farewell() -> None:
    """Waits until a member that leaves may be let go. The connection's later requests wait behind it; a peer that hangs
    up meanwhile leaves all the same."""
    await asyncio.sleep(LET_GO_AFTER_S)
