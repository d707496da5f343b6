"""Numbers of connections and attempts per address on a node. The test moves the clock."""

from __future__ import annotations

import pytest

from gateway.net.context import ConnectionInfo, RequestContext
from gateway.quotas.limits import EntityType, Limit, QuotaKey, Quotas
from gateway.quotas.throttles import SWEEP_EVERY_S, Throttles
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


BOUND = 2.0
QUOTAS = Quotas({frozenset({(EntityType.IP, "")}): {QuotaKey.CONNECTION_CREATION_RATE: BOUND}})


def test_refused_connection_is_not_charged() -> None:
    clock = Clock()
    throttles = Throttles(lambda: QUOTAS, clock)
    assert [throttles.connection_wait_s("a") for _ in range(20)] == [0.0] * 20
    waits_s = [throttles.connection_wait_s("a") for _ in range(50)]
    assert waits_s == [pytest.approx(0.5)] * 50
    assert throttles.connection_wait_s("b") == 0, "each address has the default for itself"
    clock.now_s += waits_s[-1] + 10.5
    assert throttles.connection_wait_s("a") == 0


def test_waits_are_returned_and_closed_addresses_are_forgotten() -> None:
    clock = Clock()
    told: list[tuple[QuotaKey, float]] = []
    throttles = Throttles(lambda: QUOTAS, clock, throttled=lambda key, seconds: told.append((key, seconds)))
    for number in range(100):
        throttles.connection_wait_s(f"address-{number}")
    assert not told
    for _ in range(21):
        throttles.connection_wait_s("a")
    assert told == [(QuotaKey.CONNECTION_CREATION_RATE, pytest.approx(0.5))]
    assert len(throttles) == 101
    clock.now_s += SWEEP_EVERY_S
    throttles.connection_wait_s("a")
    assert len(throttles) == 1


def test_without_a_quota_nothing_is_counted() -> None:
    throttles = Throttles(lambda: Quotas({}))
    assert throttles.connection_wait_s("a") == 0
    assert len(throttles) == 0


def test_api_versions_before_authentication_is_not_charged() -> None:
    quotas = Quotas({frozenset({(EntityType.CLIENT_ID, "")}): {QuotaKey.REQUEST_PERCENTAGE: 1.0}})
    throttles = Throttles(lambda: quotas)
    asking = RequestContext(ApiKey.API_VERSIONS, 0, 1, None, ConnectionInfo("c", "/10.0.0.1"), None)
    assert throttles.around(asking) is None
    assert throttles.around(asking._replace(api_key=ApiKey.METADATA)) is not None


def test_quota_close_to_0_mutes_a_client_and_fails_no_request() -> None:
    least: dict[str, float] = {QuotaKey.PRODUCER_BYTE_RATE: 5e-324, QuotaKey.CONTROLLER_MUTATION_RATE: 5e-324}
    throttles = Throttles(lambda: Quotas({frozenset({(EntityType.USER, "")}): least}), Clock())
    asking = RequestContext(ApiKey.PRODUCE, 9, 1, None, ConnectionInfo("c", "/10.0.0.1"), None)
    records = PartitionProduceData(records=b"records")
    produced = ProduceRequest(topic_data=(TopicProduceData(partition_data=(records,)),))
    assert throttles.before(produced, asking) > 0
    mutations = throttles.mutations(asking._replace(api_key=ApiKey.DELETE_TOPICS), 5)
    mutations.record(1)
    with pytest.raises(KafkaError) as refused:
        mutations.record(1)
    assert refused.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED


def test_clients_that_call_themselves_anew_fill_no_more_than_a_bound() -> None:
    throttles = Throttles(lambda: QUOTAS, Clock(), max_rates=10)
    debts_s: list[float] = []
    for number in range(1_000):
        debts_s.append(throttles.connection_wait_s("busy"))
        throttles.connection_wait_s(f"address-{number}")
        throttles.bucket(Limit(1.0, (None, f"id-{number}")))
        assert len(throttles) <= 20
    assert debts_s[-1] > 0, "a rate that is in use is not forgotten"
