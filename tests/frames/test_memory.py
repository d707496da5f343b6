"""Peers that mean to fill a gateway's memory: what its process grows by stays within the bound of what a node holds."""

from __future__ import annotations

import pytest

from bench.attacks import ALLOWED_BYTES, Grown, stalled_storage, unread_answers
from tests.gateway_process import GatewayFactory

pytestmark = pytest.mark.timeout(300)


async def test_peers_that_read_no_answers(gateway_factory: GatewayFactory) -> None:
    """Each has asked for sixty-four megabytes forty times: what is read for all of them at once counts together."""
    grown = await unread_answers(gateway_factory(embedded=True), seconds=6)
    assert_within(grown)


async def test_producers_while_postgres_stands_still(gateway_factory: GatewayFactory) -> None:
    """Small frames pass no bound by their number."""
    assert_within(await stalled_storage(gateway_factory(embedded=True), seconds=6))


def assert_within(grown: Grown) -> None:
    assert grown.sent_bytes, "the peers have sent something"
    assert grown.greatest - grown.before <= ALLOWED_BYTES, grown
