"""Clients that try to fill a gateway's memory: its process grows by no more than the bound of what a node holds."""

from __future__ import annotations

import pytest

from bench.attacks import ALLOWED_BYTES, Grown, stalled_storage, unread_answers
from tests.gateway_process import GatewayFactory

pytestmark = pytest.mark.timeout(300)


async def test_memory_stays_bounded_if_clients_read_no_answers(gateway_factory: GatewayFactory) -> None:
    """Each client has requested sixty-four megabytes forty times. The bound covers what is read for all of them
    together.
    """
    grown = await unread_answers(gateway_factory(embedded=True), seconds=6)
    assert_within(grown)


async def test_memory_stays_bounded_if_producers_send_while_postgres_is_stopped(
    gateway_factory: GatewayFactory,
) -> None:
    """Many small frames do not exceed the bound on memory either."""
    assert_within(await stalled_storage(gateway_factory(embedded=True), seconds=6))


def assert_within(grown: Grown) -> None:
    assert grown.sent_bytes, "the peers have sent something"
    assert grown.greatest - grown.before <= ALLOWED_BYTES, grown
