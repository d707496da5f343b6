"""A node whose secrets change in their files: later connections use the new ones, and open ones continue."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import structlog

from gateway.app import App
from gateway.building.database import DATABASE_PATIENCE_S
from gateway.building.renewal import Renewal
from gateway.building.undo import StartError
from gateway.config.broker import BrokerConfig
from gateway.config.settings import load
from gateway.security.tls import Certificates
from storage.errors import StorageUnavailable
from storage.pool import Database
from tests.clients.workers import counted
from tests.gateway.admin import admin_node
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.secured import Authority, Certificate, authenticate, plain_token
from tests.steps.waiting import until, wait_for
from tests.wire import WireClient

NOTICED_SECONDS = 60.0
LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="


def replace(path: Path, content: str) -> None:
    """Replace the file in one step, as Kubernetes does."""
    new = path.with_suffix(".new")
    new.write_text(content)
    new.rename(path)


def shown(port: int) -> bytes | None:
    """Return the certificate that a new connection sees."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30)) as connection:
        return connection.getpeercert(binary_form=True)


def der(certificate: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.certificate.read_text())


def failed_passes(gateway: GatewayProcess) -> float:
    return counted(gateway, "background_failures_total").get("secrets in files", 0)


def test_replaced_certificate_file_serves_new_connections(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """A file that cannot be used changes nothing, and the node logs that."""
    authority = Authority(tmp_path, "authority")
    first, second, third = (authority.issue("/CN=localhost") for _ in range(3))
    whole, key, chain = (tmp_path / name for name in ("tls.pem", "tls.key", "tls.crt"))
    whole.write_text(first.whole.read_text())
    key.write_text(first.key.read_text())
    chain.write_text(first.certificate.read_text())
    public, one, other = free_ports(3)
    gateway = gateway_factory(
        {
            "listeners": f"OPEN://127.0.0.1:{public},ONE://127.0.0.1:{one},OTHER://127.0.0.1:{other}",
            "listener.security.protocol.map": "OPEN:PLAINTEXT,ONE:SSL,OTHER:SSL",
            "listener.name.one.ssl.keystore.location": str(whole),
        },
        environment={"SLUICE_SET_FILE": str(_lines(tmp_path, key, chain))},
    )
    assert (shown(one), shown(other)) == (der(first), der(first))
    replace(whole, "nothing")
    wait_for(lambda: failed_passes(gateway) > 0, "the unusable file is not counted", seconds=NOTICED_SECONDS)
    assert shown(one) == der(first)
    replace(whole, second.whole.read_text())
    wait_for(lambda: shown(one) == der(second), "the replaced file is not used", seconds=NOTICED_SECONDS)
    assert shown(other) == der(first)
    key.write_text(third.key.read_text())
    chain.write_text(third.certificate.read_text())
    _lines(tmp_path, key, chain)
    wait_for(lambda: shown(other) == der(third), "the replaced texts are not used", seconds=NOTICED_SECONDS)
    assert third.key.read_text().splitlines()[1] not in gateway.log_text()


def _lines(directory: Path, key: Path, chain: Path) -> Path:
    """Write a settings file that contains key and certificate chain as text, each on one line."""
    path = directory / "settings"
    name = "listener.name.other.ssl.keystore"
    texts = {f"{name}.key": key, f"{name}.certificate.chain": chain}
    lines = [f"{setting}={' '.join(file.read_text().split(chr(10)))}" for setting, file in texts.items()]
    replace(path, "\n".join(lines))
    return path


async def test_replaced_password_file_decides_later_logins(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    path = tmp_path / "settings"
    name = "listener.name.asking.plain.sasl.jaas.config"
    path.write_text(f'{name}={LOGIN}"before";\nnum.partitions=1\n')
    (port,) = free_ports(1)
    gateway = gateway_factory(
        {
            "listeners": f"ASKING://127.0.0.1:{port}",
            "listener.security.protocol.map": "ASKING:SASL_PLAINTEXT",
            "listener.name.asking.sasl.enabled.mechanisms": "PLAIN",
        },
        environment={"SLUICE_SET_FILE": str(path)},
    )

    async def login(password: str) -> int:
        async with await WireClient.connect(gateway.bootstrap) as client:
            return (await authenticate(client, plain_token("alice", password))).error_code

    assert await login("before") == 0
    replace(path, f'{name}={LOGIN}"after";\nnum.partitions=2\n')
    wait_for(
        lambda: "settings were read again" in gateway.log_text(), "the file is not read again", seconds=NOTICED_SECONDS
    )
    assert await login("after") == 0
    assert await login("before") != 0
    log = gateway.log_text()
    assert "they take effect at the next start" in log
    assert "num.partitions" in log
    assert '"after"' not in log


async def test_setting_altered_while_files_are_read_stays_in_effect(database_url: str, tmp_path: Path) -> None:
    """The node hears of a change by another node only once."""
    path = tmp_path / "settings"
    name = "listener.name.asking.plain.sasl.jaas.config"
    path.write_text(f'{name}={LOGIN}"before";\n')
    given = {
        "listeners": "ASKING://127.0.0.1:9092",
        "listener.security.protocol.map": "ASKING:SASL_PLAINTEXT",
        "listener.name.asking.sasl.enabled.mechanisms": "PLAIN",
    }
    assignments = [f"{key}={value}" for key, value in given.items()]
    settings = load({}, assignments, {"SLUICE_SET_FILE": str(path)}).settings
    async with admin_node(database_url, broker=dict(settings.broker.static)) as node:

        class AlteredMeanwhile(Certificates):
            async def read(self, broker: BrokerConfig, *, every: bool = False) -> Callable[[], None]:
                await node.topics.set_broker_configs({"message.max.bytes": "2000"})
                await node.catalog.refresh_if_changed()
                return await super().read(broker, every=every)

        replace(path, f'{name}={LOGIN}"after";\n')
        await Renewal(settings, node.catalog, AlteredMeanwhile(), {}, asyncio.Lock()).look()
        assert "after" in node.catalog.broker.static[name]
        await node.catalog.refresh_if_changed()
        assert node.catalog.broker.message_max_bytes == 2000


async def test_option_that_changes_in_a_file_is_named_in_the_log(database_url: str, tmp_path: Path) -> None:
    headers, options = tmp_path / "headers", tmp_path / "sluice.toml"
    headers.write_text("x-key=before")
    options.write_text('log_level = "info"\n')
    settings = load({}, (), {"SLUICE_OTLP_HEADERS_FILE": str(headers)}, str(options)).settings
    async with admin_node(database_url) as node:
        renewal = Renewal(settings, node.catalog, Certificates(), {}, asyncio.Lock())
        await renewal.look()
        replace(headers, "x-key=afterwards")
        replace(options, 'log_level = "debug"\n')
        with structlog.testing.capture_logs() as lines:
            await renewal.look()
    (line,) = [each for each in lines if "at the next start" in each["event"]]
    assert line["settings"] == ["log-level", "otlp-headers"]


async def test_start_with_a_refused_login_ends_without_waiting(database_url: str, tmp_path: Path) -> None:
    parts = urlsplit(database_url)
    refused = urlunsplit(parts._replace(netloc=f"sluice_absent@{parts.netloc.rpartition('@')[2]}"))
    flags = {"database-url": refused, "listen": "127.0.0.1:0", "metrics-listen": "off", "data-dir": str(tmp_path)}
    app = App(load(flags, ["console.listen="], {}).settings)
    try:
        async with asyncio.timeout(DATABASE_PATIENCE_S / 2):
            with pytest.raises(StartError, match="sluice_absent"):
                await app.start()
    finally:
        await app.stop()


async def test_login_that_is_refused_later_is_transient(database_url: str) -> None:
    """A new password may reach Postgres before it reaches the file with the URL. Clients retry in the meantime."""
    parts = urlsplit(database_url)
    urls = [database_url]

    async def current() -> str:
        return urls[-1]

    database = await Database.open(current, hot_connections=2, cold_connections=1)
    try:
        urls.append(urlunsplit(parts._replace(netloc=f"sluice_absent@{parts.netloc.rpartition('@')[2]}")))
        async with database.hot.connection():
            with pytest.raises(StorageUnavailable, match="sluice_absent"):
                await database.hot.fetch_value("select 1")
            urls.append(database_url)
            assert await database.hot.fetch_value("select 1") == 1
    finally:
        await database.close()


async def test_new_connections_use_the_url_that_the_file_holds_then(
    gateway_factory: GatewayFactory, database_url: str, tmp_path: Path
) -> None:
    """If the file is unusable, the last URL stays in use."""
    path = tmp_path / "url"
    path.write_text(database_url + "\n")
    gateway = gateway_factory(embedded=True, environment={"SLUICE_DATABASE_URL_FILE": str(path)})
    parts = urlsplit(database_url)
    role = "sluice_renewed"
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(f"create role {role} superuser login")
        renewed = parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}")
        replace(path, urlunsplit(renewed) + "\n")

        async def cut() -> None:
            await connection.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where pid <> pg_backend_pid() and datname = current_database()"
            )

        async def users() -> set[str]:
            rows = await connection.fetch(
                "select distinct usename from pg_stat_activity"
                " where pid <> pg_backend_pid() and datname = current_database() and usename is not null"
            )
            return {row["usename"] for row in rows}

        async def all_renewed() -> bool:
            return await users() <= {role}  # a terminated session is listed until its process has ended

        await cut()
        listening = "the listener does not use the new URL"
        wait_for(lambda: "the URL of the database changed" in gateway.log_text(), listening, seconds=NOTICED_SECONDS)
        await until(all_renewed, "sessions of the former user stay")
        replace(path, "nothing\n")
        await cut()
        wait_for(
            lambda: "the last URL stays in use" in gateway.log_text(), "no word of the file", seconds=NOTICED_SECONDS
        )
        await until(all_renewed, "sessions of the former user stay")
        gateway.stop()
    finally:
        await connection.execute(f"drop role if exists {role}")
        await connection.close()
