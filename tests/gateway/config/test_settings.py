"""Settings: the source of a value, which source has priority, and which values are refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gateway.config.errors import ConfigurationError
from gateway.config.settings import OPTIONS, Configuration, load
from storage.types import Roles

MAP = "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CLIENTS:PLAINTEXT"


def origins(configuration: Configuration) -> dict[str, tuple[str | None, str]]:
    return {value.name: (value.text, value.origin) for value in configuration.values}


def write(directory: Path, text: str) -> str:
    path = directory / "sluice.toml"
    path.write_text(text)
    return str(path)


def test_defaults_apply_without_values() -> None:
    settings = load({}, (), {}).settings
    (listener,) = settings.listeners
    assert (listener.name, listener.bind, listener.advertised) == ("PLAINTEXT", *[("127.0.0.1", 9092)] * 2)
    assert settings.database_url is None
    assert settings.data_dir == Path(".sluice")
    assert settings.max_request_bytes == 104_857_600
    assert settings.broker.group_initial_rebalance_delay_ms == 3000


@pytest.mark.parametrize("option", ["data-dir", "log-store", "postgres-bin", "audit-log"])
def test_a_place_that_cannot_be_examined_is_left_to_its_first_use(option: str) -> None:
    """The name is too long. A directory of another user, in which nothing can be found, gives such an error, too."""
    place = "x" * 300
    assert origins(load({option: place}, (), {}))[option] == (place, f"flag --{option}")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, 'listen = "127.0.0.1:1"\nlog-level = "debug"\ncommitters = 3\n')
    environment = {"SLUICE_LISTEN": "127.0.0.1:2", "SLUICE_LOG_LEVEL": "error"}
    configuration = load({"listen": "127.0.0.1:3"}, (), environment, path)
    assert configuration.settings.listeners[0].bind == ("127.0.0.1", 3)
    found = origins(configuration)
    assert found["listen"] == ("127.0.0.1:3", "flag --listen")
    assert found["log-level"] == ("error", "environment SLUICE_LOG_LEVEL")
    assert found["committers"] == ("3", f"file {path}")
    assert found["tail-bytes"] == ("134217728", "default")


def test_every_option_has_flag_variable_and_file_key(tmp_path: Path) -> None:
    texts = {
        "listen": "127.0.0.1:7",
        "advertise": "example.org:7",
        "database-url": "postgresql://u@h/d",
        "data-dir": str(tmp_path / "data"),
        "rack": "r1",
        "metrics-listen": "off",
        "log-format": "json",
        "log-store": "inline",
        "log-level": "debug",
        "audit-log": str(tmp_path / "audit.log"),
        "workers": "3",
        "otlp-endpoint": "https://collector:4318/otlp",
        "otlp-headers": "x-key=secret,x-tenant=a",
        "otlp-sample": "0.25",
    }
    for option in OPTIONS:
        text = texts.get(option.name, "1500")
        if option.default is not None and option.name not in texts:
            text = str(int(option.default) // 2)
        by_flag = load({option.name: text}, (), {})
        by_variable = load({}, (), {option.variable: text})
        by_file = load({}, (), {}, write(tmp_path, f'{option.name} = "{text}"\n'))
        field = "listeners" if option.name in ("listen", "advertise") else option.field
        values = [getattr(each.settings, field) for each in (by_flag, by_variable, by_file)]
        assert values[0] == values[1] == values[2], option.name
        assert values[0] != getattr(load({}, (), {}).settings, field), option.name


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("listen", "nonsense", "expected HOST:PORT"),
        ("listen", "127.0.0.1:70000", "expected HOST:PORT"),
        ("listen", "127.0.0.1:-1", "expected HOST:PORT"),
        ("listen", "::1:9092", "brackets"),
        ("listen", "broker..example:9092", "expected a name between its dots"),
        ("advertise", f"{'a' * 64}.example:9092", "expected a name between its dots"),
        ("advertise", ":9092", "clients reach"),
        ("database-url", "mysql://x", "postgresql://"),
        ("database-url", "postgresql://me:pass@host:port/db", "postgresql://"),
        ("database-url", "postgresql://me:[pass@host:5432/db", "postgresql://"),
        ("database-url", "postgresql://me:pass@host:5432,other:70000/db", "postgresql://"),
        ("database-url", "postgresql://me:p@ss@host/db", "%40 for @"),
        ("database-url", "postgresql://me:p#ss@host/db", "postgresql://"),
        ("database-url", "postgresql://me:pass@host,,other/db", "postgresql://"),
        ("database-url", "postgresql://me:pass@/db?port=many", "postgresql://"),
        ("data-dir", "/etc/hostname", "not a directory"),
        ("data-dir", "", "empty"),
        ("rack", "", "empty"),
        ("log-format", "xml", "auto, console, json"),
        ("audit-log", "/etc", "is a directory"),
        ("audit-log", "", "empty"),
        ("otlp-endpoint", "collector:4318", "http://HOST:PORT"),
        ("otlp-endpoint", "https://me:key@collector:4318", "--otlp-headers"),
        ("otlp-headers", "x-key", "NAME=VALUE"),
        ("otlp-headers", "x key=secret", "NAME=VALUE"),
        ("otlp-headers", "x-key=a\nx-other: b", "NAME=VALUE"),
        ("otlp-sample", "1.5", "from 0 to 1"),
        ("otlp-sample", "nan", "from 0 to 1"),
        ("committers", "0", "from 1 to 16"),
        ("committers", "two", "whole number"),
        ("node-ttl-ms", "9" * 30, "whole number"),
        ("log-store", "ftp://host/records", "expected s3://BUCKET/PREFIX"),
        ("log-store", "s3://", "expected s3://BUCKET/PREFIX"),
        ("log-store", "s3://bucket/prefix?region=there", "keys in the environment"),
    ],
)
def test_a_wrong_value_is_refused_with_its_origin(option: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load({}, (), {f"SLUICE_{option.upper().replace('-', '_')}": text})
    message = str(refused.value)
    assert message.startswith(f"{option}: ")
    assert reason in message
    assert f"environment SLUICE_{option.upper().replace('-', '_')}" in message
    assert "\n" not in message


def test_a_password_is_shown_neither_in_a_value_nor_in_a_refusal() -> None:
    shown = origins(load({"database-url": "postgresql://me:secret@host/db"}, (), {}))["database-url"][0]
    assert shown == "postgresql://me:…@host/db"
    for url in ("http://me:secret@host", "postgresql://me:secret@host:port/db", "postgresql://me:[secret@host/db"):
        with pytest.raises(ConfigurationError) as refused:
            load({"database-url": url}, (), {})
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://me:secret@host,[::1]:5433/db", "postgresql://me:…@host,[::1]:5433/db"),
        (
            "postgresql://host/db?user=me&password=secret&sslmode=require",
            "postgresql://host/db?user=me&password=…&sslmode=require",
        ),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db?sslpassword=…"),
        ("postgresql://sluice@/postgres?host=/var/lib/a@b", "postgresql://sluice@/postgres?host=/var/lib/a@b"),
    ],
)
def test_a_password_is_hidden_wherever_the_url_holds_it(url: str, shown: str) -> None:
    assert origins(load({"database-url": url}, (), {}))["database-url"][0] == shown


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("s3://records", "s3://records"),
        ("s3://records/sluice/", "s3://records/sluice"),
        ("gs://records/a/b", "gs://records/a/b"),
        ("az://container/sluice", "az://container/sluice"),
        ("inline", None),
        ("auto", Path(".sluice/log")),
    ],
)
def test_records_are_stored_in_a_directory_a_bucket_or_postgres(text: str, place: str | Path | None) -> None:
    assert load({"log-store": text}, (), {}).settings.log_place == place


def test_a_key_in_the_url_of_a_bucket_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigurationError) as refused:
        load({"log-store": "s3://key:secret@records"}, (), {})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["SLUICE_LISTENER", "SLUICE_BROKER_NUM_PARTITION"])
def test_an_unknown_variable_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        load({}, (), {name: "1"})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "SLUICE_LISTN",
            "127.0.0.1:1",
            "'127.0.0.1:1' (from environment): no setting has this variable; did you mean SLUICE_LISTEN?",
        ),
        (
            "SLUICE_DATABSE_URL",
            "postgresql://me:secret@host/db",
            "'postgresql://me:…@host/db' (from environment): "
            "no setting has this variable; did you mean SLUICE_DATABASE_URL?",
        ),
        ("SLUICE_PASSWORD", "secret", "'…' (from environment): no setting has this variable"),
    ],
)
def test_mistyped_variable_is_reported_with_the_nearest_name_and_without_passwords(
    name: str, value: str, said: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load({}, (), {name: value})
    assert str(refused.value) == f"{name}: {said}"


def test_mistyped_key_of_the_file_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown key; did you mean listen\?$"):
        load({}, (), {}, write(tmp_path, "lissten = '127.0.0.1:1'\n"))


def test_variables_of_commands_that_ask_a_broker_are_known() -> None:
    load({}, (), {"SLUICE_BOOTSTRAP": "kafka:9092", "SLUICE_COMMAND_CONFIG": "/etc/sluice/admin.properties"})


def test_variables_of_the_test_suite_and_of_others_are_ignored() -> None:
    load({}, (), {"SLUICE_TEST_DATABASE_URL": "x", "PATH": "/bin"})


def test_variables_of_the_pipeline_are_ignored() -> None:
    load({}, (), {"SLUICE_PIPELINE_JARS": "/opt/jars", "SLUICE_PIPELINE_MASTER": "local[2]"})


def test_kubernetes_variables_of_a_service_named_sluice_are_ignored() -> None:
    load(
        {},
        (),
        {
            "SLUICE_SERVICE_HOST": "10.0.0.7",
            "SLUICE_SERVICE_PORT": "9092",
            "SLUICE_SERVICE_PORT_KAFKA": "9092",
            "SLUICE_PORT": "tcp://10.0.0.7:9092",
            "SLUICE_PORT_9092_TCP": "tcp://10.0.0.7:9092",
            "SLUICE_PORT_9092_TCP_ADDR": "10.0.0.7",
            "SLUICE_METRICS_SERVICE_HOST": "10.0.0.8",
            "SLUICE_METRICS_PORT_9308_TCP_PROTO": "tcp",
        },
    )
    with pytest.raises(ConfigurationError, match="SLUICE_PORT"):
        load({}, (), {"SLUICE_PORT": "9092"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lissten = '127.0.0.1:1'\n", "unknown key"),
        ("listen = [", "config: "),
        ("committers = 3.5\n", "whole number"),
        ("[listen]\na = 1\n", "expected a string"),
        ("num.partitions = 3\n", r"num: .* belong in \[broker\]"),
        ("'num.partitions' = 3\n", r"belong in \[broker\]"),
        ("[broker]\nnum.partition = 3\n", "unknown broker setting"),
        ("[broker]\n'num.partitions' = 'many'\n", "Not a number of type INT"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        load({}, (), {}, write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.toml")
    with pytest.raises(ConfigurationError) as refused:
        load({}, (), {"SLUICE_CONFIG": absent})
    assert str(refused.value) == f"config: '{absent}' (from environment SLUICE_CONFIG): No such file or directory"
    with pytest.raises(ConfigurationError, match="from flag --config"):
        load({}, (), {}, absent)


# --- broker settings --------------------------------------------------------------------------------------------------


def test_broker_settings_are_read_from_all_origins(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[broker]\nnum.partitions = 2\n'message.max.bytes' = 2000\nlog.retention.ms = -1\n"
        "auto.create.topics.enable = false\nlog.cleanup.policy = ['compact', 'delete']\n",
    )
    environment = {
        "SLUICE_SET": "num.partitions=3\nmessage.max.bytes=3000\n\ngroup.max.size=7",
        "SLUICE_BROKER_MESSAGE_MAX_BYTES": "4000",
    }
    configuration = load({}, ["group.max.size = 8", "num.partitions=5"], environment, path)
    broker = configuration.settings.broker
    assert broker.num_partitions == 5
    assert broker.message_max_bytes == 4000
    assert broker.log_retention_ms == -1
    assert broker.auto_create_topics_enable is False
    assert broker.group_max_size == 8
    assert broker.log_cleanup_policy == ("compact", "delete")
    found = origins(configuration)
    assert found["num.partitions"] == ("5", "flag --set")
    assert found["message.max.bytes"] == ("4000", "environment SLUICE_BROKER_MESSAGE_MAX_BYTES")
    assert found["log.retention.ms"] == ("-1", f"file {path}")


def test_a_comma_inside_a_value_does_not_separate() -> None:
    """A pattern for certificates' names and a password may contain what looks like another assignment."""
    given = "log.cleanup.policy=compact,delete\nssl.principal.mapping.rules=RULE:^cn=(.*),ou=.*$/$1/"
    broker = load({}, (), {"SLUICE_SET": given}).settings.broker
    assert broker.log_cleanup_policy == ("compact", "delete")
    assert broker.ssl_principal_mapping_rules == "RULE:^cn=(.*),ou=.*$/$1/"


@pytest.mark.parametrize("line", ["hush", "num.partitions=hush", "delegation.token.secret.kei=hush"])
def test_a_refused_line_of_settings_is_not_shown(line: str, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("num.network.threads=4\n")
    for environment in ({"SLUICE_SET": line}, {"SLUICE_SET": line, "SLUICE_SET_FILE": str(file)}):
        with pytest.raises(ConfigurationError) as refused:
            load({}, (), environment)
        assert "hush" not in str(refused.value)
        assert "environment SLUICE_SET" in str(refused.value)


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("num.partitions", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("num.partitionz=3", "unknown broker setting"),
        ("num.partitions=0", "must be at least 1"),
        ("group.min.session.timeout.ms=99999999", "above group.max.session.timeout.ms"),
        ("group.max.session.timeout.ms=1", "above group.max.session.timeout.ms"),
    ],
)
def test_a_wrong_assignment_is_refused(assignment: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        load({}, [assignment], {})


# --- listeners and their addresses ------------------------------------------------------------------------------------


def test_the_advertised_address_is_the_listen_address() -> None:
    configuration = load({"listen": "localhost:7"}, (), {})
    assert configuration.settings.listeners[0].advertised == ("localhost", 7)
    assert configuration.warnings == ()


@pytest.mark.parametrize("listen", ["0.0.0.0:7", "[::]:7", ":7"])
def test_a_wildcard_is_advertised_as_this_host_with_a_warning(listen: str) -> None:
    configuration = load({"listen": listen}, (), {})
    assert configuration.settings.listeners[0].advertised == (socket.gethostname(), 7)
    assert origins(configuration)["advertise"] == (f"{socket.gethostname()}:7", "default")
    assert "--advertise" in configuration.warnings[0]


def test_advertised_wildcard_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="clients reach"):
        load({"advertise": "0.0.0.0:7"}, (), {})


def test_the_advertised_address_of_the_only_listener_has_a_short_form() -> None:
    configuration = load({"advertise": "outside:8"}, ["listeners=CLIENTS://:7", MAP], {})
    (listener,) = configuration.settings.listeners
    assert (listener.name, listener.bind, listener.advertised) == ("CLIENTS", ("", 7), ("outside", 8))
    assert configuration.warnings == ()


def test_kafkas_names_outrank_the_short_forms_with_a_warning() -> None:
    flags = {"listen": "0.0.0.0:9", "advertise": "outside:9"}
    assignments = ["listeners=PLAINTEXT://127.0.0.1:7", "advertised.listeners=PLAINTEXT://inside:8"]
    configuration = load(flags, assignments, {})
    (listener,) = configuration.settings.listeners
    assert (listener.bind, listener.advertised) == (("127.0.0.1", 7), ("inside", 8))
    assert [warning.split(" ")[0] for warning in configuration.warnings] == ["listen", "advertise"]


def test_one_short_address_is_not_advertised_for_several_listeners() -> None:
    with pytest.raises(ConfigurationError, match=r"advertised\.listeners"):
        load({"advertise": "outside:8"}, ["listeners=PLAINTEXT://:7,CLIENTS://:8", MAP], {})


def test_listeners_come_from_the_environment_and_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sluice.toml"
    path.write_text('[broker]\nlisteners = ["PLAINTEXT://a:1", "CLIENTS://b:2"]\n')
    environment = {"SLUICE_BROKER_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CLIENTS:PLAINTEXT"}
    settings = load({}, (), environment, str(path)).settings
    assert [(each.name, each.bind) for each in settings.listeners] == [("PLAINTEXT", ("a", 1)), ("CLIENTS", ("b", 2))]


def test_roles_are_read_and_shown_as_they_were_given() -> None:
    given = load(
        {},
        ["listeners=CONTROLLER://c:1", "controller.listener.names=CONTROLLER"],
        {"SLUICE_BROKER_PROCESS_ROLES": "controller"},
    )
    assert given.settings.roles == Roles(is_broker=False, controller_listeners=("CONTROLLER",))
    assert load({}, (), {}).settings.roles == Roles()


@pytest.mark.parametrize(
    ("assignments", "reason"),
    [
        (["process.roles=voter"], r"process\.roles: 'voter' \(from flag --set\): expected broker, controller or both"),
        (
            ["process.roles=controller"],
            r"controller\.listener\.names: .* controller\.listener\.names must name PLAINTEXT, too",
        ),
    ],
)
def test_wrong_roles_name_their_origin(assignments: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        load({}, assignments, {})


def test_a_broker_may_have_settings_of_the_listeners_of_controllers() -> None:
    """Kafka's own example files do so: each of them contains all settings."""
    known = ["process.roles=broker", "controller.listener.names=CONTROLLER"]
    setting = "listener.name.controller.ssl.client.auth=none"
    assert [each.name for each in load({}, [*known, setting], {}).settings.listeners] == ["PLAINTEXT"]
    with pytest.raises(ConfigurationError, match="there is no listener of this name"):
        load({}, [known[0], setting], {})


def test_short_forms_warn_if_they_contradict_the_listeners() -> None:
    names = ["listeners=PLAINTEXT://127.0.0.1:7", "advertised.listeners=PLAINTEXT://kafka:7"]
    assert load({"listen": "127.0.0.1:7", "advertise": "kafka:7"}, names, {}).warnings == ()
    assert load({"listen": "127.0.0.1:8", "advertise": "kafka:8"}, names, {}).warnings == (
        "listen (from flag --listen) is ignored: listeners is given",
        "advertise (from flag --advertise) is ignored: advertised.listeners is given",
    )


def test_a_wrong_listener_names_its_origin() -> None:
    with pytest.raises(
        ConfigurationError, match=r"listeners: 'nonsense' \(from flag --set\): expected NAME://HOST:PORT"
    ):
        load({}, ["listeners=nonsense"], {})


def test_rack_is_read_by_either_name() -> None:
    assert load({"rack": "a"}, (), {}).settings.rack == "a"
    assert load({}, ("broker.rack=b",), {}).settings.rack == "b"
    both = load({"rack": "a"}, ("broker.rack=b",), {})
    assert both.settings.rack == "b"
    assert both.warnings == ("rack (from flag --rack) is ignored: broker.rack is given",)


def test_headers_for_the_collector_are_read_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("authorization=Bearer a=b, x-tenant=t\n")
    configuration = load({}, (), {"SLUICE_OTLP_HEADERS_FILE": str(path)})
    assert configuration.settings.otlp_headers == (("authorization", "Bearer a=b"), ("x-tenant", "t"))
    assert origins(configuration)["otlp-headers"][0] == "[hidden]"
    assert "Bearer" not in repr(configuration)
    with pytest.raises(ConfigurationError) as refused:
        load({"otlp-headers": "=secret"}, (), {})
    assert "secret" not in str(refused.value)


def test_audit_lines_of_several_workers_need_a_file() -> None:
    with pytest.raises(ConfigurationError, match="several workers need a file"):
        load({"audit-log": "stdout", "workers": "2"}, (), {})
    assert load({"audit-log": "stdout"}, (), {}).settings.audit_log == "stdout"
