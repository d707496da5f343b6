"""An application of stock clients changes its group protocol member by member and back again, while records flow.

The one idea: members stop and start in order, as in a rolling deployment, with auto-commit. So every partition is
committed before it moves. No record may be lost or repeated, on the way there or back.
"""

from __future__ import annotations

import pytest

from tests.clients.rolling import Rolling
from tests.gateway_process import GatewayFactory

MEMBERS = 2
SETTINGS = {
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
}


@pytest.mark.parametrize(
    "classic",
    ["confluent-range", "confluent-cooperative-sticky", "kafka-python-cooperative-sticky", "aiokafka-range"],
)
def test_an_application_is_upgraded_and_rolled_back_under_load(gateway_factory: GatewayFactory, classic: str) -> None:
    rolling = Rolling(gateway_factory(SETTINGS))
    with rolling.load():
        for _ in range(MEMBERS):
            rolling.start(classic)
        rolling.settle()
        assert rolling.type_of_group() == "classic"
        for kind, group_type in (("confluent-consumer-uniform", "consumer"), (classic, "classic")):
            for _ in range(MEMBERS):
                rolling.replace(kind)
            assert rolling.type_of_group() == group_type
