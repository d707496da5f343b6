"""The bench of the worst requests covers every API, and each of its requests passes the first checks."""

from __future__ import annotations

from uuid import UUID

import pytest

from bench import worst_requests
from bench.worst_requests import WIDE_PARTITIONS, administration, of_share_groups, whole_apis
from gateway.apis import SERVED
from gateway.coordinator.share.heartbeat import is_member_id
from protocol.codec import decode_request, encode, has_more_elements

LINES = {int(line.api_key): line for line in SERVED}


def test_every_api_has_a_worst_request() -> None:
    names: list[str] = []
    assert not list(whole_apis(lambda name: bool(names.append(name))))
    assert {name.partition(":")[0] for name in names} == {line.api_key.name.lower() for line in SERVED}


@pytest.mark.parametrize("api", ["create_topics: topics", "share_fetch: topics.partitions", "join_group: protocols"])
def test_no_request_has_more_elements_than_its_api_takes(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst_requests, "ELEMENTS", 100_000)
    (case,) = whole_apis(lambda name: name == api)
    (request,) = case.requests
    most = LINES[int(case.api_key)].max_elements
    assert has_more_elements(request, most // 3)
    assert not has_more_elements(request, most)


def test_share_group_requests_name_valid_groups_and_members() -> None:
    small = ("share_group_heartbeat: subscribed_topic_names", "acknowledge_types")  # requests with few elements
    cases = list(whole_apis(lambda name: name.startswith("share_") and name.endswith(small)))
    assert len(cases) == 3
    for case in cases:
        assert case.requests[0].group_id == "worst-share"
        assert is_member_id(case.requests[0].member_id)


def test_requests_that_follow_one_another_can_be_decoded() -> None:
    cases = [*administration(), *of_share_groups(UUID(int=1))]
    for case in cases:
        (request,) = case.requests
        body = b"".join(bytes(chunk) for chunk in encode(request, case.version))
        assert decode_request(case.api_key, case.version, body) == request
        assert (
            has_more_elements(request, min(WIDE_PARTITIONS, worst_requests.ADMINISTERED) - 1)
            or "describe_share" in case.name
            or "join_group" in case.name
            or case.name == "describe_configs: a node and its loggers"  # The answer is large, not the request.
        )
        assert not has_more_elements(request, LINES[int(case.api_key)].max_elements)
