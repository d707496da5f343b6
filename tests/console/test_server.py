"""The console by HTTP: what it refuses, what it shows to which user, what its actions do, and what it costs."""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin does not declare its exports for type checkers.

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from gateway.console.groups import MAX_OFFSETS
from gateway.console.sessions import MAX_ATTEMPTS, MAX_ATTEMPTS_OF_ALL, Attempts, address_key
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.conftest import gateways
from tests.console.consoles import Consoled, Person, start_consoled
from tests.gateway_process import ROOT, GatewayFactory, free_ports
from tests.postgres import Databases
from tests.secured import AUTHORIZER, Authority
from tests.steps.waiting import wait_for
from tests.tokens import Issuer, key_set, oauth_settings, published
from tests.wire import WireClient

ORDERS = "orders"
MEMBER = "AAAAAAAAAAAAAAAAAAAAAQ"
"""A member id, which the client of a share group chooses."""


@pytest.fixture(scope="module")
def stocked(console: Consoled) -> Consoled:
    """The module's console with a topic of three partitions and twenty records."""
    console.topic(ORDERS, 3)
    console.produce(ORDERS, [(f"key-{n}", json.dumps({"n": n, "user": {"name": "Ana"}}), None) for n in range(20)])
    return console


def commit(console: Consoled, group: str, offset: int, topic: str = ORDERS) -> None:
    consumer = Consumer({"bootstrap.servers": console.gateway.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    consumer.close()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_page_has_a_policy_without_inline_scripts(console: Consoled):
    answer = Person(console.port).ask("GET", "/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert b"<script>" not in answer.body
    assert b" style=" not in answer.body


@pytest.mark.parametrize("host", ["attacker.example", "127.0.0.1.attacker.example", "10.0.0.1"])
def test_request_for_another_host_is_refused(console: Consoled, host: str):
    answer = Person(console.port, host=host).ask("GET", "/api/session")
    assert answer.status == 400
    assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "[::1]"])
def test_request_for_an_address_of_this_machine_is_answered(console: Consoled, host: str):
    """A node can listen at any loopback address."""
    assert Person(console.port, host=host).ask("GET", "/api/session").status == 200


def test_api_without_a_session_is_refused(console: Consoled):
    assert Person(console.port).ask("GET", "/api/groups").status == 401


def test_change_without_the_pages_token_is_refused(console: Consoled):
    person = console.person
    person.csrf = "wrong"
    assert person.post("action/plan", {"action": "delete", "group": "g"}).status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://attacker.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ],
)
def test_change_from_another_site_is_refused(console: Consoled, headers: dict[str, str]):
    body = {"action": "delete", "group": "nobody"}  # without the check the answer would be "not found"
    assert console.person.ask("POST", "/api/action/plan", body, headers).status == 400


def test_cookie_is_kept_from_scripts_and_from_other_sites(console: Consoled):
    cookie = Person(console.port).ask("GET", "/api/session").headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_consoles_of_one_host_keep_their_sessions_apart(console: Consoled, guarded: Consoled):
    """A browser sends a cookie to every port of the host that has set it."""
    alice = Person(guarded.port)
    assert alice.log_in("alice", "alice-secret").status == 200
    cookies = dict(each.cookie.split("=", 1) for each in (alice, console.person))
    alice.cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
    assert alice.get("session")["user"] == "User:alice"


@pytest.mark.parametrize(
    "path",
    [
        "/..%2f..%2fserver.py",
        "/../server.py",
        "/static/../server.py",
        "/server.py",
        "/%00",
        "/api/nothing",
    ],
)
def test_other_files_are_not_served(console: Consoled, path: str):
    assert console.person.ask("GET", path).status == 404


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("group/timeline", {"id": "g", "from": "5", "to": "4"}),
        ("group/timeline", {"id": "g", "from": "x"}),
        ("group/timeline", {"id": "g", "to": "9" * 30}),
        ("group/timeline", {}),
        ("topic/records", {"topic": "t" * 300}),
        ("topic/records", {"topic": ORDERS, "begin": "offset", "value": "x"}),
        ("topic/records", {"topic": ORDERS, "begin": "never"}),
        ("topic/records", {"topic": ORDERS, "form": "avro", "schema": "{"}),
        ("topic/records", {"topic": ORDERS, "text": "x" * 2_000}),
        ("topic/records", {"topic": ORDERS, "limit": "²"}),
        ("topic/records", {"topic": ORDERS, "next": "0:--5"}),
        ("topic/record", {"topic": ORDERS, "partition": str(2**31), "offset": "0"}),
        ("topics", {"search": "a\0b"}),
    ],
)
def test_malformed_query_is_a_bad_request(console: Consoled, path: str, query: dict[str, str]):
    answer = console.person.ask("GET", f"/api/{path}", **query)
    assert answer.status == 400, answer.body
    assert answer.json["error"]


def test_newest_records_are_as_many_as_asked_for_if_partitions_are_empty(console: Consoled):
    console.topic("lopsided", 4)
    console.produce("lopsided", [(None, str(number), None) for number in range(60)])
    found = console.person.get("topic/records", topic="lopsided", limit="50")["records"]
    assert sorted(int(record["value"]["text"]) for record in found) == list(range(10, 60))


def test_search_without_its_offset_or_time_says_what_to_enter(stocked: Consoled):
    for begin in ("offset", "time"):
        answer = stocked.person.ask("GET", "/api/topic/records", topic=ORDERS, begin=begin)
        assert (answer.status, answer.json["error"]) == (400, f"enter the {begin} to begin at")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("login", '{"user": "\\ud800", "password": "x"}'),
        ("login", '{"user": "a", "password": "\\ud800"}'),
        ("login", "[" * 100_000),
        ("action/plan", '{"a": ' + "9" * 5_000 + "}"),
        ("produce", '{"topic": "orders", "partition": 1099511627776, "value": "x"}'),
        (
            "produce",
            '{"topic": "orders", "partition": 0, "value": "x", "headers": [{"name": "\\ud800", "value": "x"}]}',
        ),
    ],
)
def test_body_that_no_page_sends_is_a_bad_request(console: Consoled, route: str, body: str):
    person = console.person
    connection = http.client.HTTPConnection("127.0.0.1", person.port, timeout=30)
    headers = {"Content-Type": "application/json", "X-CSRF-Token": person.csrf, "Cookie": person.cookie}
    try:
        connection.request("POST", f"/api/{route}", body, headers)
        assert connection.getresponse().status == 400
    finally:
        connection.close()
    assert "the console failed to answer" not in console.gateway.log_text()


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("Origin", "http://[", 400),
        ("X-CSRF-Token", "\xff", 403),
        ("Content-Type", "application/json; charset=none", 400),
    ],
)
def test_header_that_cannot_be_read_is_refused(console: Consoled, name: str, value: str, status: int):
    answer = console.person.ask("POST", "/api/action/plan", {}, {name: value})
    assert answer.status == status
    assert "the console failed to answer" not in console.gateway.log_text()


def test_topic_with_a_timestamp_that_postgres_cannot_hold_is_shown(console: Consoled):
    console.topic("nanoseconds", 1, {"message.timestamp.after.max.ms": str(2**63 - 1)})
    producer = Producer({"bootstrap.servers": console.gateway.bootstrap})
    producer.produce("nanoseconds", b"v", partition=0, timestamp=1_700_000_000_000_000_000)
    assert producer.flush(10) == 0
    (partition,) = console.person.get("topic", name="nanoseconds")["partitions"]
    assert partition["newest"] == 1_700_000_000_000_000_000


@pytest.mark.parametrize("body", [[], "text", 5, None])
def test_body_that_is_no_object_is_a_bad_request(console: Consoled, body: Any):
    person = console.person
    answer = person.ask(
        "POST", "/api/action/plan", body, {"Content-Type": "application/json", "X-CSRF-Token": person.csrf}
    )
    assert answer.status == 400


def test_long_body_of_a_person_who_has_not_logged_in_is_not_parsed(console: Consoled):
    answer = Person(console.port).post("login", {"user": "a", "password": "b", "more": "x" * 70_000})
    assert (answer.status, answer.json["error"]) == (400, "the request is longer than 65536 bytes")


@pytest.mark.parametrize("route", ["action", "action/plan"])
def test_long_body_of_an_action_is_not_parsed(console: Consoled, route: str):
    """Two megabytes of short lists take the event loop's time for a second."""
    answer = console.person.post(route, {"action": "reset", "group": "g", "partitions": [[]] * 20_000})
    assert (answer.status, answer.json["error"]) == (400, "the request is longer than 65536 bytes")


@pytest.mark.parametrize("part", [[], ""], ids=["lists", "texts"])
def test_long_body_that_is_no_record_is_not_parsed(console: Consoled, part: Any):
    topic = f"parts-{type(part).__name__}"
    console.topic(topic, 1)
    record = {"topic": topic, "partition": 0, "key": None, "value": '\\"[]' * 20_000}
    answer = console.person.post("produce", {**record, "more": [part] * 20_000})
    assert (answer.status, answer.json["error"]) == (400, "the request has too many parts")
    assert console.person.post("produce", record).status == 200


def test_body_in_another_charset_than_utf_8_is_refused(console: Consoled):
    """Python decodes Punycode in quadratic time: two megabytes would stop the node for many minutes."""
    connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=30)
    body = b'{"user": "a", "password": "b"}-' + b"b" * 60_000
    try:
        connection.request("POST", "/api/login", body, {"Content-Type": "application/json; charset=punycode"})
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]) == (400, "the request is not in UTF-8")
    finally:
        connection.close()


def test_compressed_body_is_not_decompressed(console: Consoled):
    """A compressed megabyte may become a gigabyte."""
    body = gzip.compress(b'{"user": "a", "password": "b"}')
    connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=30)
    try:
        connection.request("POST", "/api/login", body, {"Content-Type": "application/json", "Content-Encoding": "gzip"})
        assert connection.getresponse().status == 400
    finally:
        connection.close()


def test_number_of_more_than_64_bits_is_a_bad_request(console: Consoled):
    console.topic("wide", 1)
    commit(console, "wide", 0, "wide")
    for to in ("offset", "shift", "time"):
        given = {"action": "reset", "group": "wide", "to": to, "value": 2**70}
        assert console.person.post("action/plan", given).status == 400
    assert "the console failed to answer" not in console.gateway.log_text()


def test_stream_of_a_partition_that_does_not_exist_says_so(console: Consoled):
    console.topic("narrow", 1)
    answer = console.person.ask("GET", "/api/live/records", topic="narrow", partitions="7")
    assert answer.body == b'event: failed\ndata: {"error": "topic narrow has no such partition"}\n\n'
    assert "never retrieved" not in console.gateway.log_text()


def test_unknown_group_and_topic_are_not_found(console: Consoled):
    assert console.person.ask("GET", "/api/group", id="nobody").status == 404
    assert console.person.ask("GET", "/api/topic", name="nothing").status == 404


def test_mistyped_group_and_topic_are_answered_with_the_nearest_names_that_the_viewer_may_see(guarded: Consoled):
    bob, alice = Person(guarded.port), Person(guarded.port)
    bob.log_in("bob", "bob-secret")
    assert bob.ask("GET", "/api/group", id="theirz").json["error"].endswith("; did you mean theirs or hers?")
    assert bob.ask("GET", "/api/topic", name="secrat").json["error"].endswith("; did you mean secret?")
    alice.log_in("alice", "alice-secret")
    for route, query in (("group", {"id": "theirz"}), ("topic", {"name": "secrat"})):
        answer = alice.ask("GET", f"/api/{route}", **query)
        assert answer.status == 403
        assert "did you mean" not in answer.json["error"]


def test_unknown_long_group_does_not_block_the_node(gateway_factory: GatewayFactory):
    console = start_consoled(gateway_factory)
    letters = random.Random(1).choices("ab", k=199)
    assert console.gateway.database_url is not None
    with psycopg.connect(console.gateway.database_url) as connection:
        for number in range(500):
            random.Random(number).shuffle(letters)
            connection.execute(
                "insert into consumer_group values (%s, 0, 'classic', 'Empty', 0, null, 0, null, '{}')",
                ["".join(letters)],
            )
    random.Random(-1).shuffle(letters)
    began_s = time.monotonic()
    assert console.person.ask("GET", "/api/group", id="".join(letters)).status == 404
    assert time.monotonic() - began_s < 1  # Comparing the ids takes longer.


def test_open_connections_are_bounded(console: Consoled):
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", console.port))) for _ in range(520)]
        peers[-1].settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert peers[-1].recv(1) == b""


# --- starting ---------------------------------------------------------------------------------------------------------


def test_taken_default_port_costs_only_the_console(gateway_factory: GatewayFactory):
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # another process may use the port, which has the same effect
            taken.bind(("127.0.0.1", 8080))
            taken.listen()
        gateway = gateway_factory({"console.listen": "127.0.0.1:8080"})
        wait_for(lambda: "no console: its port is taken" in gateway.log_text(), "the warning")
        assert gateway.log_text().count("no console") == 1


def test_taken_given_port_fails_the_start(gateway_factory: GatewayFactory):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=r"console\.listen"):
            gateway_factory({"console.listen": f"127.0.0.1:{port}"})


def test_other_address_without_tls_fails_the_start(gateway_factory: GatewayFactory):
    (port,) = free_ports(1)
    with pytest.raises(AssertionError, match=r"console\.ssl\.keystore\.location"):
        gateway_factory({"console.listen": f"0.0.0.0:{port}"})


def test_other_address_with_tls_serves_https(gateway_factory: GatewayFactory, tmp_path: Path):
    (port,) = free_ports(1)
    whole = Authority(tmp_path, "ca").issue("/CN=localhost").whole
    gateway_factory({"console.listen": f"0.0.0.0:{port}", "console.ssl.keystore.location": str(whole)})

    def asked() -> dict[str, Any] | None:
        unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=unchecked)
        try:
            connection.request("GET", "/api/session")
            response = connection.getresponse()
            return json.loads(response.read())
        except OSError:
            return None
        finally:
            connection.close()

    answer = wait_for(asked, "the console answers")
    assert answer is not None
    assert answer["needsLogin"]


# --- pages ------------------------------------------------------------------------------------------------------------


def test_group_of_another_node_is_shown_and_changed_from_this_node(gateway_factory: GatewayFactory):
    first = start_consoled(gateway_factory)
    second = start_consoled(gateway_factory, database_url=first.gateway.database_url)
    first.topic(ORDERS, 1)
    first.produce(ORDERS, [("k", "v", None)] * 5)
    groups = [f"group-{number}" for number in range(12)]
    for group in groups:
        commit(first, group, 2)

    def shared() -> bool:
        shown = [second.person.get("group", id=group) for group in groups]
        return {group["coordinator"] for group in shown} == {1, 2}

    wait_for(shared, "both nodes coordinate groups")
    for console in (first, second):
        assert [row["id"] for row in console.person.get("groups")["groups"]] == sorted(groups)
    elsewhere = next(group for group in groups if not second.person.get("group", id=group)["isHere"])
    done = second.person.act(action="reset", group=elsewhere, to="earliest")
    assert done.status == 200, done.body
    assert first.person.get("group", id=elsewhere)["offsets"][0]["committed"] == 0


def test_message_browser_finds_by_offset_key_text_path_and_time(stocked: Consoled):
    person = stocked.person

    def offsets(**query: Any) -> list[int]:
        found = person.get("topic/records", topic=ORDERS, partitions="0", **query)
        return sorted(record["offset"] for record in found["records"])

    assert offsets(begin="offset", value="17") == [17, 18, 19]
    assert offsets(begin="latest", limit="2") == [18, 19]
    assert offsets(begin="earliest", key="key-7") == [7]
    assert offsets(begin="earliest", text="KEY-1") == [1, *range(10, 20)]
    assert offsets(begin="earliest", path="user.name=Ana", limit="3") == [0, 1, 2]
    assert offsets(begin="earliest", path="n=12") == [12]
    first = person.get("topic/records", topic=ORDERS, partitions="0", begin="earliest", limit="1")["records"][0]
    assert offsets(begin="time", value=str(first["timestamp"])) == list(range(20))
    assert offsets(begin="time", value=str(first["timestamp"] + 3_600_000)) == []


def test_search_continues_where_it_stopped(stocked: Consoled):
    person = stocked.person
    found = person.get("topic/records", topic=ORDERS, partitions="0", begin="earliest", limit="15")
    assert not found["done"]
    positions = ",".join(f"{index}:{at}" for index, at in found["next"].items())
    rest = person.get("topic/records", topic=ORDERS, partitions="0", begin="earliest", limit="15", next=positions)
    assert sorted(record["offset"] for record in rest["records"]) == list(range(15, 20))
    assert rest["done"]


LONG_SCHEMA = {"type": "record", "name": "Long", "doc": "x" * 20_000, "fields": [{"name": "n", "type": "long"}]}


@pytest.mark.parametrize(
    "query",
    [
        {"form": "avro", "schema": json.dumps(LONG_SCHEMA)},
        {"begin": "earliest", "next": ",".join(f"{index}:1000" for index in range(2_000))},
    ],
    ids=["schema", "positions"],
)
def test_query_with_a_long_schema_or_many_positions_is_answered(stocked: Consoled, query: dict[str, str]):
    assert stocked.person.ask("GET", "/api/topic/records", topic=ORDERS, **query).status == 200


def test_transaction_states_are_shown_on_request(console: Consoled):
    topic = "decided"
    console.topic(topic, 1)
    person = console.person
    settings = {"bootstrap.servers": console.gateway.bootstrap, "transactional.id": "states", "linger.ms": 0}
    producer = Producer(settings)
    producer.init_transactions(30)
    for ends in (producer.commit_transaction, producer.abort_transaction, None):
        producer.begin_transaction()
        producer.produce(topic, b"v")
        producer.flush(30)
        if ends is not None:
            ends(30)
    wait_for(lambda: person.get("topic", name=topic)["partitions"][0]["end"] == 5, "five records")
    plain = person.get("topic/records", topic=topic, begin="earliest")["records"]
    assert [record["offset"] for record in plain] == [0]
    states = {
        record["offset"]: record["state"]
        for record in person.get("topic/records", topic=topic, begin="earliest", control="1")["records"]
    }
    assert states == {0: "committed", 1: "commit marker", 2: "aborted", 3: "abort marker", 4: "open"}
    (open_one,) = person.get("transactions")["transactions"]
    assert open_one["id"] == "states"
    assert open_one["partitions"][0]["first"] == 4
    producer.abort_transaction(30)


def test_each_transaction_of_a_producer_has_its_own_state(console: Consoled):
    topic = "redecided"
    console.topic(topic, 1)
    # More than one answer of Fetch holds lies before the transactions.
    console.produce(topic, [(None, os.urandom(600_000), None) for _ in range(3)])
    producer = Producer({"bootstrap.servers": console.gateway.bootstrap, "transactional.id": "twice", "linger.ms": 0})
    producer.init_transactions(30)
    for end in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.produce(topic, b"v")
        producer.flush(30)
        end(30)
    person = console.person
    wait_for(lambda: person.get("topic", name=topic)["partitions"][0]["end"] == 7, "seven records")
    found = person.get("topic/records", topic=topic, begin="offset", value="3", control="1")["records"]
    states = {record["offset"]: record["state"] for record in found}
    assert states == {3: "aborted", 4: "abort marker", 5: "committed", 6: "commit marker"}
    marker = person.get("topic/record", topic=topic, partition=0, offset=4)
    assert (marker["offset"], marker["value"]["size"]) == (4, 6)


def test_person_above_a_quota_waits_as_a_client_does(console: Consoled):
    console.topic("limited", 1)
    console.produce("limited", [(None, os.urandom(400_000), None) for _ in range(3)])
    limit = ["quotas", "set", "--bootstrap", console.gateway.bootstrap, "--client", "sluice-console"]
    person = console.person
    for rate in ("100000", "1000000000"):
        subprocess.run([sys.executable, "-m", "gateway.cli", *limit, f"consumer_byte_rate={rate}"], check=True)
        began_s = time.monotonic()
        found = person.get("topic/records", topic="limited", begin="earliest")
        took_s = time.monotonic() - began_s
        assert (len(found["records"]), took_s > 1) == (3, rate == "100000")


def test_large_value_is_cut_in_lists_and_longer_alone(console: Consoled):
    console.topic("large", 1, {"max.message.bytes": "10000000"})
    producer = Producer({"bootstrap.servers": console.gateway.bootstrap, "message.max.bytes": 9_000_000})
    producer.produce("large", b"x" * 8_000_000)
    assert producer.flush(30) == 0
    person = console.person
    (record,) = person.get("topic/records", topic="large", begin="earliest")["records"]
    assert record["value"]["size"] == 8_000_000
    assert len(record["value"]["text"]) == 4_096
    alone = person.ask("GET", "/api/topic/record", topic="large", partition=0, offset=0)
    assert 200_000 < len(alone.body) < 1_000_000


def test_record_is_produced_with_key_and_headers(stocked: Consoled):
    person = stocked.person
    stocked.topic("written", 2)
    headers = [{"name": "trace", "value": "1"}]
    body = {"topic": "written", "partition": 1, "key": "k", "value": "v", "headers": headers}
    assert person.post("produce", body).json == {"partition": 1, "offset": 0}
    record = person.get("topic/record", topic="written", partition=1, offset=0)
    assert (record["key"]["text"], record["value"]["text"]) == ("k", "v")
    assert record["headers"][0]["name"] == "trace"


# --- actions ----------------------------------------------------------------------------------------------------------


def test_reset_shows_a_plan_does_it_and_writes_who_did_it(stocked: Consoled):
    commit(stocked, "resetting", 12)
    person = stocked.person
    given = {"group": "resetting", "action": "reset", "to": "shift", "value": -5}
    plan = person.post("action/plan", given).json
    (row,) = plan["rows"]
    assert (row["committed"], row["new"], row["moved"]) == (12, 7, -5)
    assert "5 records again" in plan["warnings"][0]
    assert person.get("group", id="resetting")["offsets"][0]["committed"] == 12
    assert person.post("action", {**given, "digest": plan["digest"]}).status == 200
    assert person.get("group", id="resetting")["offsets"][0]["committed"] == 7
    words = [row["what"] for row in person.get("group/timeline", id="resetting")["words"]]
    assert any("User:ANONYMOUS at 127.0.0.1: reset offsets of orders[0] to shift -5" in what for what in words)


def test_reset_of_one_topic_leaves_the_others(stocked: Consoled):
    stocked.topic("beside", 1)
    stocked.produce("beside", [("k", "v", None)] * 3)
    commit(stocked, "of-two", 12)
    commit(stocked, "of-two", 2, "beside")
    person = stocked.person
    assert person.act(group="of-two", action="reset", to="earliest", partitions=[{"topic": ORDERS}]).status == 200
    offsets = {row["topic"]: row["committed"] for row in person.get("group", id="of-two")["offsets"]}
    assert offsets == {ORDERS: 0, "beside": 2}


def test_plan_that_has_changed_is_not_carried_out(stocked: Consoled):
    commit(stocked, "moving", 12)
    person = stocked.person
    given = {"group": "moving", "action": "reset", "to": "earliest"}
    plan = person.post("action/plan", given).json
    commit(stocked, "moving", 15)
    answer = person.post("action", {**given, "digest": plan["digest"]})
    assert answer.status == 409
    assert "has changed since you looked" in answer.json["error"]
    assert person.get("group", id="moving")["offsets"][0]["committed"] == 15


@pytest.mark.parametrize(("to", "new"), [("earliest", 0), ("latest", 4)])
def test_reset_is_carried_out_while_producers_write(console: Consoled, to: str, new: int):
    topic, group = f"written-{to}", f"resetting-{to}"
    console.topic(topic, 1)
    console.produce(topic, [("k", "v", None)] * 3)
    commit(console, group, 2, topic)
    person = console.person
    given = {"group": group, "action": "reset", "to": to}
    plan = person.post("action/plan", given).json
    console.produce(topic, [("k", "v", None)])
    answer = person.post("action", {**given, "digest": plan["digest"]})
    assert answer.status == 200, answer.body
    assert person.get("group", id=group)["offsets"][0]["committed"] == new


def test_offsets_and_group_are_deleted(stocked: Consoled):
    commit(stocked, "leaving", 3)
    person = stocked.person
    assert person.act(group="leaving", action="forget", topic=ORDERS).status == 200
    assert person.get("group", id="leaving")["offsets"] == []
    assert person.act(group="leaving", action="delete").status == 200
    assert person.ask("GET", "/api/group", id="leaving").status == 404


def test_deleted_offsets_of_a_topic_with_many_partitions_are_named(console: Consoled):
    """A plan shows at most 2,000 committed offsets, and deletes no others."""
    console.topic("vast", MAX_OFFSETS + 1)
    consumer = Consumer({"bootstrap.servers": console.gateway.bootstrap, "group.id": "vast"})
    consumer.commit(offsets=[TopicPartition("vast", index, 0) for index in range(MAX_OFFSETS + 1)], asynchronous=False)
    consumer.close()
    done = console.person.act(group="vast", action="forget", topic="vast")
    left = [row["partition"] for row in console.person.get("group", id="vast")["offsets"]]
    assert (done.json["done"], left) == ("delete the committed offsets of topic vast[0-1999]", [MAX_OFFSETS])


def test_setting_of_a_group_is_changed_and_a_wrong_one_refused(stocked: Consoled):
    commit(stocked, "configured", 1)
    person = stocked.person
    name = "consumer.session.timeout.ms"
    given = {"group": "configured", "action": "set", "name": name, "value": "50000"}
    assert person.act(**given).status == 200
    settings = {row["name"]: row for row in person.get("group/settings", id="configured")["settings"]}
    assert (settings[name]["value"], settings[name]["source"]) == ("50000", "group")
    assert person.post("action/plan", {**given, "value": "soon"}).status == 409


def test_reset_of_a_group_with_members_is_blocked_and_a_member_can_be_removed(stocked: Consoled):
    stocked.join("busy", "worker", ORDERS)
    person = stocked.person
    wait_for(lambda: person.get("group", id="busy")["offsets"][0]["committed"] is not None, "a commit")
    plan = person.post("action/plan", {"group": "busy", "action": "reset", "to": "earliest"}).json
    assert "has members" in plan["blocked"]
    (member,) = person.get("group", id="busy")["members"]
    assert person.act(group="busy", action="remove", member=member["id"]).status == 200
    wait_for(lambda: member["id"] not in str(person.get("group", id="busy")["members"]), "the member is gone")


async def test_removal_of_a_member_is_blocked_where_kafka_has_no_request_for_it(console: Consoled):
    async with await WireClient.connect(console.gateway.bootstrap) as client:
        joining = ShareGroupHeartbeatRequest(
            group_id="shared", member_id=MEMBER, member_epoch=0, subscribed_topic_names=("none",)
        )
        assert (await client.send(joining, 1)).error_code == 0
        given = {"group": "shared", "action": "remove", "member": MEMBER}
        plan = await asyncio.to_thread(lambda: console.person.post("action/plan", given))
    assert plan.json["blocked"] == "Kafka has no request that removes a member of a share group."


def test_read_only_console_refuses_every_change(gateway_factory: GatewayFactory):
    console = start_consoled(gateway_factory, {"console.read.only": "true"})
    console.topic(ORDERS, 1)
    commit(console, "kept", 0)
    person = console.person
    plan = person.post("action/plan", {"group": "kept", "action": "delete"}).json
    done = person.post("action", {"group": "kept", "action": "delete", "digest": plan["digest"]})
    assert done.status == 403
    assert person.post("produce", {"topic": ORDERS, "partition": 0, "value": "v"}).status == 403
    assert person.get("group", id="kept")


# --- login ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(postgres: Databases) -> Iterator[Consoled]:
    """A console with an authorizer: alice may describe the group `hers` and topic `orders`, bob is a super user."""
    with gateways(postgres) as factory:
        console = _start_guarded(factory)
        yield console
        console.close()


def _start_guarded(factory: GatewayFactory) -> Consoled:
    console = start_consoled(factory, {**AUTHORIZER, "super.users": "User:bob;User:ANONYMOUS"})
    _prepare(console)
    return console


def _prepare(console: Consoled) -> None:
    admin = AdminClient({"bootstrap.servers": console.gateway.bootstrap})
    for mechanism, user in ((ScramMechanism.SCRAM_SHA_256, "alice"), (ScramMechanism.SCRAM_SHA_512, "bob")):
        info = ScramCredentialInfo(mechanism, 4096)
        change = UserScramCredentialUpsertion(user, info, f"{user}-secret".encode())
        admin.alter_user_scram_credentials([change])[user].result(30)
    console.topic(ORDERS, 1)
    console.topic("secret", 1)
    for kind, name, operation in (
        (ResourceType.GROUP, "hers", AclOperation.DESCRIBE),
        (ResourceType.TOPIC, ORDERS, AclOperation.DESCRIBE),
    ):
        binding = AclBinding(
            kind, name, ResourcePatternType.LITERAL, "User:alice", "*", operation, AclPermissionType.ALLOW
        )
        admin.create_acls([binding])[binding].result(30)
    for group in ("hers", "theirs"):
        commit(console, group, 0)
    commit(console, "hers", 0, "secret")


def test_authorizer_demands_a_login(guarded: Consoled):
    person = Person(guarded.port)
    assert person.get("session")["needsLogin"]
    assert person.ask("GET", "/api/overview").status == 401


def test_viewer_sees_only_what_the_authorizer_permits(guarded: Consoled):
    alice = Person(guarded.port)
    assert alice.log_in("alice", "alice-secret").status == 200
    assert alice.get("session")["user"] == "User:alice"
    assert [row["id"] for row in alice.get("groups")["groups"]] == ["hers"]
    assert [row["name"] for row in alice.get("topics")["topics"]] == [ORDERS]
    refused = ["group?id=theirs", "group/timeline?id=theirs", "group/lag?id=theirs", "topic?name=secret"]
    refused += ["live/group?id=theirs", "acls", "users", "quotas", "nodes", "settings"]
    for path in refused:
        assert alice.ask("GET", f"/api/{path}").status == 403, path
    assert {row["topic"] for row in alice.get("group", id="hers")["offsets"]} == {ORDERS}
    assert "secret" not in str(alice.get("group/lag", id="hers"))
    assert "secret" not in str(alice.get("group/timeline", id="hers"))
    assert alice.get("topic", name=ORDERS)["mayRead"] is False
    assert not alice.get("topic", name=ORDERS)["mayProduce"]
    for action in ({"action": "reset", "to": "earliest"}, {"action": "delete"}):
        assert alice.post("action/plan", {"group": "hers", **action}).status == 403
    assert alice.get("overview")["nodes"] == []


def test_lag_of_a_group_leaves_out_topics_that_the_viewer_may_not_describe(guarded: Consoled):
    commit(guarded, "hers", 0, "secret")
    guarded.produce("secret", [(None, b"v", None)] * 7)
    guarded.produce(ORDERS, [(None, b"v", None)])
    for user, lag in (("bob", 8), ("alice", 1)):
        person = Person(guarded.port)
        person.log_in(user, f"{user}-secret")
        (row,) = person.get("groups", search="hers")["groups"]
        assert row["lag"] == lag
        (urgent,) = [each for each in person.get("overview")["attention"] if each["id"] == "hers"]
        assert f"{lag} records wait" in urgent["why"]


def test_overview_of_another_person_hides_no_rising_lag(guarded: Consoled):
    alice, bob = Person(guarded.port), Person(guarded.port)
    alice.log_in("alice", "alice-secret")
    bob.log_in("bob", "bob-secret")
    for topic in ("read", "unread"):
        guarded.topic(topic, 1)
    commit(guarded, "slow", 0, "unread")
    guarded.join("slow", "reader", "read")

    def reasons() -> list[str]:
        guarded.produce("unread", [(None, b"v", None)] * 50)
        alice.get("overview")
        return [each["why"] for each in bob.get("overview")["attention"] if each["id"] == "slow"]

    wait_for(reasons, "the lag rises", holds=lambda found: "Lag is rising" in str(found), seconds=30)


def test_timeline_names_no_hidden_topic_that_an_administrator_acted_on(guarded: Consoled):
    commit(guarded, "hers", 0, "secret")
    bob, alice = Person(guarded.port), Person(guarded.port)
    bob.log_in("bob", "bob-secret")
    alice.log_in("alice", "alice-secret")
    assert bob.act(group="hers", action="forget", topic="secret").status == 200
    assert "topic secret" in str(bob.get("group/timeline", id="hers"))
    assert "secret" not in str(alice.get("group/timeline", id="hers"))


def test_timeline_names_no_hidden_topic_of_a_refused_commit(guarded: Consoled):
    bob, alice = Person(guarded.port), Person(guarded.port)
    bob.log_in("bob", "bob-secret")
    alice.log_in("alice", "alice-secret")
    assert guarded.gateway.database_url is not None
    with psycopg.connect(guarded.gateway.database_url, autocommit=True) as sql:
        sql.execute("insert into sluice.sql_principal values (current_user, 'User:bob')")
        with pytest.raises(psycopg.Error, match="is fenced"):
            sql.execute("select kafka.commit_offset('hers', 'secret', 0, 5, generation => 9, member => 'gone')")
    wait_for(lambda: "secret[0] to 5" in str(bob.get("group/timeline", id="hers")), "the refusal is in the journal")
    assert "secret" not in str(alice.get("group/timeline", id="hers"))


def test_open_page_of_a_group_ends_when_its_viewer_may_not_see_the_group_any_more(guarded: Consoled):
    kind, pattern, permission = ResourceType.GROUP, ResourcePatternType.LITERAL, AclPermissionType.ALLOW
    fields = kind, "lent", pattern, "User:alice", "*", AclOperation.DESCRIBE, permission
    binding, same = AclBinding(*fields), AclBindingFilter(*fields)
    admin = AdminClient({"bootstrap.servers": guarded.gateway.bootstrap})
    admin.create_acls([binding])[binding].result(30)
    commit(guarded, "lent", 0)
    alice = Person(guarded.port)
    alice.log_in("alice", "alice-secret")
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    connection.request("GET", "/api/live/group?id=lent", headers={"Cookie": alice.cookie})
    stream = connection.getresponse()
    assert stream.status == 200
    named = (line.split()[1] for line in iter(stream.readline, b"") if line.startswith(b"event: "))
    assert next(name for name in named if name == b"lag")
    admin.delete_acls([same])[same].result(30)
    commit(guarded, "lent", 7)
    assert next(name for name in named if name in (b"lag", b"failed")) == b"failed"
    connection.close()


def test_reset_that_fails_for_one_topic_is_in_the_journal(gateway_factory: GatewayFactory):
    guarded = _start_guarded(gateway_factory)
    admin = AdminClient({"bootstrap.servers": guarded.gateway.bootstrap})
    for kind, name, operation in (
        (ResourceType.GROUP, "partly", AclOperation.READ),
        (ResourceType.TOPIC, "readable", AclOperation.READ),
        (ResourceType.TOPIC, "hidden", AclOperation.DESCRIBE),
    ):
        pattern, permission = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
        binding = AclBinding(kind, name, pattern, "User:dora", "*", operation, permission)
        admin.create_acls([binding])[binding].result(30)
    change = UserScramCredentialUpsertion("dora", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), b"secret")
    admin.alter_user_scram_credentials([change])["dora"].result(30)
    for topic in ("readable", "hidden"):
        guarded.topic(topic, 1)
        guarded.produce(topic, [(None, b"v", None)])
        commit(guarded, "partly", 0, topic)
    bob, dora = Person(guarded.port), Person(guarded.port)
    bob.log_in("bob", "bob-secret")
    dora.log_in("dora", "secret")
    assert dora.act(group="partly", action="reset", to="latest").status == 403
    offsets = {row["topic"]: row["committed"] for row in bob.get("group", id="partly")["offsets"]}
    assert offsets == {"readable": 1, "hidden": 0}
    words = [row["what"] for row in bob.get("group/timeline", id="partly")["words"]]
    assert [text for text in words if "User:dora" in text and "readable[0]" in text], words


def test_super_user_sees_everything_and_is_named_in_the_journal(guarded: Consoled):
    bob = Person(guarded.port)
    assert bob.log_in("bob", "bob-secret").status == 200
    assert len(bob.get("acls")["acls"]) == 2
    assert {row["user"] for row in bob.get("users")["users"]} == {"alice", "bob"}
    commit(guarded, "done-for", 0)
    assert bob.act(group="done-for", action="forget", topic=ORDERS).status == 200
    words = [row["what"] for row in bob.get("group/timeline", id="done-for")["words"]]
    assert any("User:bob" in what for what in words)


def test_streams_of_one_viewer_leave_room_for_others(guarded: Consoled):
    def opened(user: str) -> http.client.HTTPResponse:
        person = Person(guarded.port)
        person.log_in(user, f"{user}-secret")
        connection = stack.enter_context(
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30))
        )
        connection.request("GET", "/api/live/group?id=hers", headers={"Cookie": person.cookie})
        return connection.getresponse()

    with contextlib.ExitStack() as stack:
        while opened("alice").status == 200:
            pass
        assert opened("bob").status == 200


def test_logout_ends_the_session(guarded: Consoled):
    bob = Person(guarded.port)
    bob.log_in("bob", "bob-secret")
    cookie = bob.cookie
    assert bob.post("logout", {}).status == 200
    bob.cookie = cookie
    assert bob.ask("GET", "/api/groups").status == 401


def test_session_ends_when_the_password_of_its_user_changes(gateway_factory: GatewayFactory):
    guarded = _start_guarded(gateway_factory)
    admin = AdminClient({"bootstrap.servers": guarded.gateway.bootstrap})

    def choose(password: bytes) -> None:
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        change = UserScramCredentialUpsertion("carol", info, password)
        admin.alter_user_scram_credentials([change])["carol"].result(30)

    choose(b"first")
    carol = Person(guarded.port)
    assert carol.log_in("carol", "first").status == 200
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    connection.request("GET", "/api/live/overview", headers={"Cookie": carol.cookie})
    stream = connection.getresponse()
    assert stream.readline()
    choose(b"second")
    wait_for(stream.readline, "the open page ends", holds=lambda line: not line, seconds=30)
    connection.close()
    assert carol.ask("GET", "/api/groups").status == 401


def test_login_gives_another_cookie_than_before(guarded: Consoled):
    person = Person(guarded.port)
    person.log_in("bob", "bob-secret")
    name = person.cookie.partition("=")[0]
    person.cookie = f"{name}=chosen-by-an-attacker"
    person.log_in("bob", "bob-secret")
    assert person.cookie.startswith(f"{name}=")
    assert "chosen-by-an-attacker" not in person.cookie


def test_nodes_page_has_the_figures_of_its_node(console: Consoled):
    health = console.person.get("nodes")["figures"]["1"]
    assert health["leases_moved"] == {"groups": 0, "jobs": 0}
    assert {"wakeups_sent", "wakeups_heard", "wakeups_missed", "wakeups_late", "damaged_chunks"} <= health.keys()
    ages = health["background_last_success_age_seconds"]
    assert {"retention", "compaction", "leases"} <= ages.keys()
    assert all(0 <= age < 600 for age in ages.values())


def test_nodes_page_explains_each_background_pass(console: Consoled):
    ages = console.person.get("nodes")["figures"]["1"]["background_last_success_age_seconds"]
    script = (ROOT / "gateway/console/static/more.js").read_text()
    (passes,) = re.findall(r"^const PASSES = \{\n(.*?)^\};", script, re.DOTALL | re.MULTILINE)
    explained = set(re.findall(r'^  "?([a-z A-Z]+)"?: ', passes, re.MULTILINE))
    assert ages.keys() <= explained


def test_each_node_shows_the_figures_of_all_nodes_that_answer(gateway_factory: GatewayFactory):
    first = start_consoled(gateway_factory, {"node.id": "1"})
    second = start_consoled(gateway_factory, {"node.id": "2"}, database_url=first.gateway.database_url)
    people = first.person, second.person

    shown: list[dict[str, Any]] = []

    def answered() -> bool:
        shown[:] = [person.get("nodes")["figures"] for person in people]
        return all(seen.keys() == {"1", "2"} and seen["1"]["leases_moved"]["groups"] > 0 for seen in shown)

    # The first node held all shards of groups, and hands half of them over to the second.
    wait_for(answered, "both consoles show that the first node handed groups over")
    for seen in shown:
        assert seen["2"]["leases_moved"]["groups"] == 0
        assert seen["1"]["background_last_success_age_seconds"].keys() >= {"retention", "leases"}
    os.kill(second.gateway.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: people[0].get("nodes")["figures"].keys() == {"1"}, "the frozen node is shown without figures")
    finally:
        os.kill(second.gateway.pid, signal.SIGCONT)
    wait_for(lambda: people[0].get("nodes")["figures"].keys() == {"1", "2"}, "the node answers again")


def test_figures_of_a_node_that_does_not_live_are_ignored(console: Consoled):
    assert console.gateway.database_url is not None
    with psycopg.connect(console.gateway.database_url, autocommit=True) as connection:
        for payload in ("[" * 4_000, '[77, {"a": {"": 1}}]'):
            connection.execute("select pg_notify('sluice_figures', %s)", (payload,))
    assert console.person.get("nodes")["figures"].keys() == {"1"}
    assert "Error" not in console.gateway.log_text()


def test_viewer_who_may_not_describe_the_cluster_sees_no_figures(guarded: Consoled):
    alice = Person(guarded.port)
    alice.log_in("alice", "alice-secret")
    assert alice.ask("GET", "/api/nodes").status == 403


def test_secrets_are_in_no_answer(guarded: Consoled):
    bob = Person(guarded.port)
    bob.log_in("bob", "bob-secret")
    for path in ("users", "settings", "overview", "acls", "session"):
        body = bob.ask("GET", f"/api/{path}").body
        assert b"bob-secret" not in body
        assert b"stored_key" not in body


def test_guessing_passwords_is_slowed_down(gateway_factory: GatewayFactory):
    console = start_consoled(gateway_factory, {**AUTHORIZER, "super.users": "User:ANONYMOUS"})
    person = Person(console.port)
    for _ in range(5):
        assert person.log_in("mallory", "guess").status == 403
    answer = person.log_in("mallory", "guess")
    assert answer.status == 429
    assert int(answer.headers["Retry-After"]) > 0


def test_logins_that_succeed_keep_nobody_waiting():
    attempts = Attempts()
    for number in range(MAX_ATTEMPTS_OF_ALL):
        attempts.failed(f"user {number}")  # noted before the password is compared
        attempts.forget(f"user {number}")
    assert attempts.wait_s("user another") == 0


def test_logins_from_one_network_of_ipv6_count_together():
    attempts = Attempts()
    for number in range(MAX_ATTEMPTS):
        attempts.failed(address_key(f"2001:db8:0:1::{number}"))
    assert attempts.wait_s(address_key("2001:db8:0:1:ffff::")) > 0
    assert attempts.wait_s(address_key("2001:db8:0:2::1")) == 0


def test_login_that_could_not_be_checked_is_no_failed_login(gateway_factory: GatewayFactory, tmp_path: Path):
    (open_port, asking_port, silent_port) = free_ports(3)
    settings = {
        "listeners": f"OPEN://127.0.0.1:{open_port},ASKING://127.0.0.1:{asking_port}",
        "listener.security.protocol.map": "OPEN:PLAINTEXT,ASKING:SASL_PLAINTEXT",
        **oauth_settings(f"http://127.0.0.1:{silent_port}/keys"),
        **AUTHORIZER,
        "super.users": "User:ANONYMOUS",
    }
    person = Person(start_consoled(gateway_factory, settings).port)
    token = Issuer(tmp_path).token()
    assert {person.post("login", {"token": token}).status for _ in range(MAX_ATTEMPTS + 1)} == {503}


def test_access_token_logs_its_subject_in_until_it_ends(gateway_factory: GatewayFactory, tmp_path: Path):
    issuer = Issuer(tmp_path)
    open_port, asking_port = free_ports(2)
    with published() as place:
        place.answers["/keys"] = key_set(issuer.jwk())
        settings = {
            "listeners": f"OPEN://127.0.0.1:{open_port},ASKING://127.0.0.1:{asking_port}",
            "listener.security.protocol.map": "OPEN:PLAINTEXT,ASKING:SASL_PLAINTEXT",
            **oauth_settings(f"{place.url}/keys"),
            **AUTHORIZER,
            "super.users": "User:alice;User:ANONYMOUS",
        }
        console = start_consoled(gateway_factory, settings)
        person = Person(console.port)
        assert person.get("session")["takesTokens"]
        for refused in (issuer.token(aud="another"), issuer.token(exp=int(time.time()) - 60), "no token"):
            answer = person.post("login", {"token": refused})
            assert (answer.status, "the access token is refused" in answer.json["error"]) == (403, True)
        answer = person.post("login", {"token": issuer.token(exp=int(time.time()) + 5)})
        assert (answer.status, answer.json["user"]) == (200, "User:alice")
        assert person.get("overview")["nodes"]
        wait_for(lambda: person.ask("GET", "/api/overview").status == 401, "the session ends with the token")
        assert person.post("login", {"token": issuer.token()}).status == 200


def test_console_without_tokens_says_that_it_takes_none(guarded: Consoled):
    answer = Person(guarded.port).post("login", {"token": "x"})
    assert (answer.status, "OAUTHBEARER" in answer.json["error"]) == (400, True)


def test_action_of_a_person_is_a_line_of_the_audit_log(gateway_factory: GatewayFactory, tmp_path: Path):
    path = tmp_path / "audit.log"
    console = start_consoled(gateway_factory, environment={"SLUICE_AUDIT_LOG": str(path)})
    console.topic(ORDERS, 1)
    commit(console, "leaving", 0)
    before = len(path.read_text().splitlines())
    assert console.person.act(group="leaving", action="delete").status == 200
    (line,) = [json.loads(text) for text in path.read_text().splitlines()[before:]]
    assert (line["api"], line["request"], line["errors"]) == ("delete_groups", {"groups_names": ["leaving"]}, [])
    assert (line["principal"], line["host"]) == ("User:ANONYMOUS", "127.0.0.1")


def test_member_that_a_person_removes_is_a_line_of_the_audit_log(gateway_factory: GatewayFactory, tmp_path: Path):
    path = tmp_path / "audit.log"
    console = start_consoled(gateway_factory, environment={"SLUICE_AUDIT_LOG": str(path)})
    console.topic(ORDERS, 1)
    console.join("shrinking", "reader", ORDERS)
    try:
        (member,) = console.person.get("group", id="shrinking")["members"]
        before = len(path.read_text().splitlines())
        assert console.person.act(group="shrinking", action="remove", member=member["id"]).status == 200
        lines = [json.loads(text) for text in path.read_text().splitlines()[before:]]
        assert [line["api"] for line in lines] == ["leave_group"]
        assert [each["member_id"] for each in lines[0]["request"]["members"]] == [member["id"]]
    finally:
        console.close()
