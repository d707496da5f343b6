"""Names in the order of Java's maps, as Apache Kafka 4.4 answered them."""

from __future__ import annotations

import pytest

from gateway.config.java_order import in_java_order


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        (
            ["request_percentage", "controller_mutation_rate", "producer_byte_rate", "consumer_byte_rate"],
            ["producer_byte_rate", "consumer_byte_rate", "controller_mutation_rate", "request_percentage"],
        ),
        (["producer_byte_rate", "consumer_byte_rate"], ["consumer_byte_rate", "producer_byte_rate"]),
        (["user", "client-id"], ["client-id", "user"]),
    ],
)
def test_names_come_in_the_order_of_a_java_map(given: list[str], listed: list[str]) -> None:
    assert in_java_order(given) == listed
