"""`sluice acls`, `quotas` and `configs` with a gateway that has an authorizer."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from gateway.cli import main
from gateway.commands.errors import CommandError
from gateway.commands.security import read_properties
from tests.clients.acls import ME, delivered
from tests.commands.terminal import Prompt, produce
from tests.commands.terminal import topic as topic
from tests.conftest import gateways
from tests.gateway_process import GatewayProcess
from tests.postgres import Databases
from tests.secured import AUTHORIZER, USERS, Secured, start_secured


@pytest.fixture(scope="module")
def guarded(postgres: Databases) -> Iterator[GatewayProcess]:
    """A gateway that permits every client to use a resource without ACLs. Otherwise no client could create the first
    ACL.
    """
    with gateways(postgres) as start:
        yield start({**AUTHORIZER, "allow.everyone.if.no.acl.found": "true"})


@pytest.fixture
def sluice(guarded: GatewayProcess, capsys: pytest.CaptureFixture[str]) -> Prompt:
    return Prompt(guarded.bootstrap, capsys)


@pytest.fixture(scope="module")
def secured(postgres: Databases) -> Iterator[Secured]:
    """A gateway whose second listener requires a password. Clients of the first listener may do everything."""
    with gateways(postgres) as start:
        yield start_secured(start, {**AUTHORIZER, "super.users": "User:ANONYMOUS"})


def properties(path: Path, user: str, password: str) -> str:
    escaped = password.replace('"', '\\\\"')
    path.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config="
        f'org.apache.kafka.common.security.plain.PlainLoginModule required username="{user}" password="{escaped}";\n'
    )
    return str(path)


def test_an_acl_is_added_shown_obeyed_and_removed(sluice: Prompt, guarded: GatewayProcess, topic: str) -> None:
    wanted = ("acls", "add", "--deny", ME, "--operation", "write", "--topic", topic)
    row = {
        "principal": ME,
        "permission": "deny",
        "operation": "write",
        "resource_type": "topic",
        "resource": topic,
        "pattern": "literal",
        "host": "*",
    }
    assert sluice.json(*wanted) == [{**row, "result": "added"}]
    assert sluice.json("acls", "list", "--topic", topic) == [row]
    refused = delivered(guarded.bootstrap, topic)
    assert refused is not None
    assert refused.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    lines = sluice("acls", "remove", "--topic", topic).splitlines()
    assert lines[0].split() == ["PRINCIPAL", "PERMISSION", "OPERATION", "RESOURCE-TYPE", "RESOURCE", "PATTERN", "HOST"]
    assert lines[1].split() == [*(str(value) for value in row.values())]
    assert lines[-1] == "Nothing was changed; --execute removes these."
    assert sluice.json("acls", "list", "--topic", topic) == [row], "without --execute nothing is removed"
    assert sluice.json("acls", "remove", "--topic", topic, "--execute") == [row]
    assert sluice.json("acls", "list", "--topic", topic) == []
    assert delivered(guarded.bootstrap, topic) is None


def test_list_shows_each_acl_that_decides_and_remove_only_the_exact_name(sluice: Prompt, topic: str) -> None:
    allow = ("acls", "add", "--allow", "User:carol", "--operation", "read", "--operation", "describe-configs")
    sluice(*allow, "--topic", topic[:-2], "--prefixed")
    sluice(*allow, "--topic", topic)
    found = [(row["pattern"], row["operation"]) for row in sluice.json("acls", "list", "--topic", topic)]
    assert sorted(found) == [
        ("literal", "describe-configs"),
        ("literal", "read"),
        ("prefixed", "describe-configs"),
        ("prefixed", "read"),
    ]
    assert len(sluice.json("acls", "list", "--topic", topic, "--pattern", "literal", "--operation", "read")) == 1
    removed = sluice.json("acls", "remove", "--topic", topic, "--execute")
    assert {row["pattern"] for row in removed} == {"literal"}
    assert {row["pattern"] for row in sluice.json("acls", "list", "--topic", topic)} == {"prefixed"}
    assert len(sluice.json("acls", "remove", "--topic", topic, "--pattern", "match", "--execute")) == 2


def test_mistyped_names_of_acls_are_answered_with_the_nearest_names(
    sluice: Prompt, guarded: GatewayProcess, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mistyped = topic.replace("orders", "order")
    add = ["acls", "add", "--allow", "User:carol", "--operation", "read", "-b", guarded.bootstrap, "--topic"]
    assert main([*add, mistyped]) == 0
    assert capsys.readouterr().err.startswith(f"sluice: there is no topic {mistyped} yet; did you mean ")
    assert main([*add, topic]) == 0
    assert capsys.readouterr().err == ""
    said = sluice("acls", "remove", "--topic", f"{topic}x", code=1)
    assert said.startswith("sluice: no ACL matches; did you mean ")
    assert topic in said
    assert "did you mean User:carol?" in sluice("acls", "remove", "--principal", "User:carrol", code=1)
    for words, hint in (
        (["--allow", "User:c", "--operation", "raed"], "did you mean read?"),
        (["--allow", "carol", "--operation", "read"], "'carol' is no principal: write User:NAME"),
    ):
        with pytest.raises(SystemExit) as exited:
            main(["acls", "add", *words, "--topic", topic])
        assert exited.value.code == 2
        assert hint in capsys.readouterr().err
    assert "give --allow User:NAME" in sluice("acls", "add", "--operation", "read", "--cluster", code=1)
    assert "name what to remove" in sluice("acls", "remove", "--execute", code=1)
    sluice("acls", "remove", "--principal", "User:carol", "--execute")


def test_quotas_are_set_listed_and_removed(sluice: Prompt) -> None:
    user = f"u-{uuid.uuid4().hex[:8]}"
    of_user = {"user": user, "client_id": None, "ip": None}
    entity = ("--user", user)
    assert sluice.json("quotas", "set", "producer_byte_rate=1048576", "request_percentage=12.5", *entity) == [
        {**of_user, "quota": "producer_byte_rate", "value": 1048576},
        {**of_user, "quota": "request_percentage", "value": 12.5},
    ]
    both = sluice.json("quotas", "set", "consumer_byte_rate=5", *entity, "--default-client-id")
    assert both == [{"user": user, "client_id": "<default>", "ip": None, "quota": "consumer_byte_rate", "value": 5}]
    assert [row["quota"] for row in sluice.json("quotas", "list", *entity)] == [
        "producer_byte_rate",
        "request_percentage",
        "consumer_byte_rate",
    ]
    (removed,) = sluice.json("quotas", "remove", "producer_byte_rate", *entity)
    assert (removed["quota"], removed["result"]) == ("producer_byte_rate", "removed")
    assert [row["quota"] for row in sluice.json("quotas", "remove", *entity)] == ["request_percentage"]
    said = sluice("quotas", "remove", *entity, code=1)
    assert said == f"sluice: there is no quota of user {user}\n"
    assert f"did you mean {user}?" in sluice("quotas", "remove", "--user", user + "x", code=1)
    sluice("quotas", "remove", *entity, "--default-client-id")
    assert sluice.json("quotas", "list", *entity) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "producer_byte_rat=1", "--user", "u"], "did you mean producer_byte_rate?"),
        (["set", "producer_byte_rate", "--user", "u"], "write producer_byte_rate=NUMBER"),
        (["set", "producer_byte_rate=-1", "--user", "u"], "write producer_byte_rate=NUMBER"),
        (["remove", "producer_byte_rates", "--ip", "::1"], "did you mean producer_byte_rate?"),
        (["list", "--user", "u", "--default-user"], "not allowed with"),
    ],
)
def test_mistyped_quotas_are_refused_without_asking_a_broker(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["quotas", *words])
    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_settings_of_topics_brokers_and_groups_are_altered_and_described(sluice: Prompt, topic: str) -> None:
    changed = {row["name"]: row["source"] for row in sluice.json("configs", "describe", "topic", topic, "--changed")}
    assert changed["retention.ms"] == "topic"
    assert "default" not in changed.values()
    (changed,) = sluice.json("configs", "alter", "topic", topic, "--set", "retention.ms=7200000")
    assert (changed["value"], changed["source"], changed["sensitive"]) == ("7200000", "topic", False)

    group = f"g-{uuid.uuid4().hex[:8]}"
    (changed,) = sluice.json("configs", "alter", "group", group, "--set", "consumer.session.timeout.ms=50000")
    assert (changed["value"], changed["source"]) == ("50000", "group")
    (changed,) = sluice.json("configs", "alter", "group", group, "--delete", "consumer.session.timeout.ms")
    assert changed["source"] != "group"

    (node,) = (row["node"] for row in sluice.json("cluster", "info")[0]["nodes"])
    (changed,) = sluice.json("configs", "alter", "broker", "--set", "log.retention.ms=7000000")
    assert (changed["value"], changed["source"]) == ("7000000", "all brokers")
    own = {row["name"]: row for row in sluice.json("configs", "describe", "broker", str(node))}
    assert (own["log.retention.ms"]["value"], own["log.retention.ms"]["source"]) == ("7000000", "all brokers")
    sluice("configs", "alter", "broker", "--delete", "log.retention.ms")


def test_refused_settings_are_answered_with_the_nearest_names(sluice: Prompt, topic: str) -> None:
    said = sluice("configs", "alter", "topic", topic, "--set", "retention.mss=1", code=1)
    assert said.startswith(f"sluice: topic {topic}: ")
    assert "did you mean retention.ms" in said
    mistyped = topic.replace("orders", "order")
    assert f"no topic {mistyped}; did you mean" in sluice("configs", "describe", "topic", mistyped, code=1)
    assert "name a group" in sluice("configs", "describe", "group", code=1)
    assert "one is no broker's id" in sluice("configs", "describe", "broker", "one", code=1)
    assert "there is no broker 9; the brokers are 1" in sluice("configs", "describe", "broker", "9", code=1)


def test_refusal_for_want_of_an_acl_names_the_acl_that_permits_it(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = Prompt(secured.open, capsys)
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    admin("topics", "create", topic)
    produce(secured.gateway, topic, 0, ["a"])
    credentials = properties(tmp_path / "bob.properties", "bob", USERS["bob"])
    user = Prompt(secured.sasl, capsys)
    for words, grant in (
        (("acls", "list"), ("--operation", "describe", "--cluster")),
        (("quotas", "list"), ("--operation", "describe-configs", "--cluster")),
        (("topics", "describe", topic), ("--operation", "describe", "--topic", topic)),
        (("consume", topic, "-e"), ("--operation", "read", "--topic", topic)),
        (("consume", topic, "-e", "-g", "readers"), ("--operation", "read", "--group", "readers")),
        (("groups", "describe", "g"), ("--operation", "describe", "--group", "g")),
    ):
        said = user(*words, "--command-config", credentials, code=1)
        assert "no ACL permits this" in said
        assert f"`sluice acls add --allow User:NAME {' '.join(grant)}`" in said
        assert said.count("\n") == 1
        admin("acls", "add", "--allow", "User:bob", *grant)
    assert user("consume", topic, "-e", "--command-config", credentials) == "a\n"


def test_a_wrong_password_names_the_file_to_check(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = properties(tmp_path / "wrong.properties", "nobody", "wrong")
    said = Prompt(secured.sasl, capsys)("acls", "list", "--command-config", file, code=1)
    assert said.endswith(f"; check username and password in {file}\n")


def test_users_are_managed_by_a_broker(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, user = Prompt(secured.open, capsys), f"u-{uuid.uuid4().hex[:8]}"
    monkeypatch.setattr("sys.stdin", io.StringIO("her password\n"))
    only = ("--mechanism", "SCRAM-SHA-256")
    assert admin("users", "add", user, "--password-stdin", *only) == f"{user} authenticates by SCRAM-SHA-256\n"
    rows = [row for row in admin.json("users", "list") if row["user"] == user]
    assert [(row["mechanism"], row["iterations"]) for row in rows] == [("SCRAM-SHA-256", 4096)]
    file = Path(properties(tmp_path / "user.properties", user, "her password"))
    file.write_text(
        file.read_text().replace("mechanism=PLAIN", "mechanism=SCRAM-SHA-256").replace("plain.Plain", "scram.Scram")
    )
    sasl = Prompt(secured.sasl, capsys)
    sasl("topics", "list", "--command-config", str(file))
    refused = sasl("users", "list", "--command-config", str(file), code=1)
    assert "`sluice acls add --allow User:NAME --operation describe --cluster`" in refused
    assert f"there is no user {user}x; did you mean {user}?" in admin("users", "delete", f"{user}x", code=1)
    other = ("--mechanism", "SCRAM-SHA-512")
    assert f"user {user} does not authenticate by SCRAM-SHA-512" in admin("users", "delete", user, *other, code=1)
    admin("users", "delete", user)
    assert user not in admin("users", "list")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "the password is empty" in admin("users", "add", user, "--password-stdin", code=1)


def test_a_key_as_text_in_a_properties_file_is_refused_with_the_next_step(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=SSL\nssl.keystore.key=-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(CommandError, match="name a file with the key"):
        read_properties(str(file))
