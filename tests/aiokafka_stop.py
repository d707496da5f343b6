"""Stop a consumer of aiokafka, also after a fetch that has just failed.

`AIOKafkaConsumer.stop` cancels the task that waits before it sends the fetch again, and the cancellation of that task
escapes from `stop` (aiokafka 0.14.0). The consumer has left its group by then, but its connections are still open.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def stop_aiokafka(consumer: Any) -> None:
    """Stop the `aiokafka.AIOKafkaConsumer`. Raise what its `stop` raises, except the cancellation of its own task."""
    try:
        await consumer.stop()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        await consumer._client.close()  # noqa: SLF001 - the step that `stop` has not reached
