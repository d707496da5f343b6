"""Check from the node itself whether its advertised addresses can be reached.

The one idea: an address that clients cannot use is the commonest mistake with Kafka, and shows first in the clients'
logs. A node cannot know what clients reach, so the result is a warning and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from gateway.config.listeners import render_address
from storage.types import Address

logger = structlog.get_logger(__name__)

TIMEOUT_S = 3.0


async def warn_of_unreachable(advertised: Mapping[str, Address]) -> None:
    """Open a connection to each address, and log the addresses that refuse it."""
    await asyncio.gather(*(_look(name, address) for name, address in advertised.items()))


async def _look(name: str, address: Address) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError) as error:
        logger.warning(
            "this node cannot reach its own advertised address: clients may not either (see advertised.listeners)",
            listener=name,
            address=render_address(address),
            error=str(error) or f"no answer in {TIMEOUT_S} s",
        )
    else:
        writer.close()
