"""Settings of listeners whose clients authenticate: which of them apply, which are refused, and that no secret is
shown.
"""

from __future__ import annotations

import pytest

from gateway.config.definition import HIDDEN
from gateway.config.errors import ConfigurationError
from gateway.config.jaas import parse_jaas
from gateway.config.security import ListenerSecurity, listener_security
from gateway.config.settings import Configuration, load

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
JAAS = "listener.name.door.plain.sasl.jaas.config"
KEYS = "sasl.oauthbearer.jwks.endpoint.url"
BASE = ("listeners=DOOR://127.0.0.1:9092", "listener.security.protocol.map=DOOR:SASL_PLAINTEXT")


def loaded(*more: str) -> Configuration:
    return load({}, (*BASE, *more), {})


def security(*more: str) -> ListenerSecurity:
    settings = loaded(*more).settings
    return listener_security(settings.listeners[0], settings.broker)


def test_users_of_plain_are_read_in_kafkas_syntax() -> None:
    text = f'{MODULE} required\n username="admin" user_alice="a;b=c" user_bob=\'b"\\\'b\' user_carol=simple ;'
    sasl = security("sasl.enabled.mechanisms=PLAIN", f"{JAAS}={text}").sasl
    assert sasl is not None
    assert sasl.plain_users == {"alice": "a;b=c", "bob": "b\"'b", "carol": "simple"}
    assert "simple" not in repr(sasl)


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", f"{MODULE} required", f"{MODULE} always;", f'{MODULE} required a="b"', f"{MODULE} required a=;",
     f'{MODULE} required a "b";', f'{MODULE} required a="b;', f'{MODULE} required a="1" a="2";', "é required;"],
)  # fmt: skip
def test_invalid_login_module_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValueError, match=r".+") as refused:
        parse_jaas(text)
    assert not text or text not in str(refused.value)


def test_a_listeners_own_settings_come_first_and_a_mechanisms_before_them() -> None:
    sasl = security(
        "sasl.enabled.mechanisms=PLAIN",
        "listener.name.door.sasl.enabled.mechanisms=SCRAM-SHA-512,SCRAM-SHA-256",
        f"listener.name.door.scram-sha-512.sasl.jaas.config={SCRAM_MODULE} required;",
        "connections.max.reauth.ms=1000",
        "listener.name.door.connections.max.reauth.ms=2000",
        "listener.name.door.scram-sha-256.connections.max.reauth.ms=3000",
        "sasl.server.max.receive.size=99",
    ).sasl
    assert sasl is not None
    assert sasl.mechanisms == ("SCRAM-SHA-512", "SCRAM-SHA-256")
    assert sasl.max_reauth_ms == {"SCRAM-SHA-512": 2000, "SCRAM-SHA-256": 3000}
    assert sasl.max_receive_bytes == 99


@pytest.mark.parametrize(
    ("more", "named", "reason"),
    [
        ((), "sasl.enabled.mechanisms", "name the mechanisms"),
        (("sasl.enabled.mechanisms=GSSAPI",), "sasl.enabled.mechanisms", "must be a list of PLAIN"),
        (("sasl.enabled.mechanisms=PLAIN",), JAAS, "knows no users"),
        (("sasl.enabled.mechanisms=PLAIN", f"{JAAS}={SCRAM_MODULE} required;"), JAAS, "expected the module"),
        (("sasl.enabled.mechanisms=PLAIN", f"{JAAS}=nonsense"), JAAS, "MODULE required"),
        (("sasl.enabled.mechanisms=OAUTHBEARER",), KEYS, "unsigned tokens are refused"),
        (("sasl.enabled.mechanisms=OAUTHBEARER", f"{KEYS}=ftp://a/b"), KEYS, "must be https"),
        (("sasl.enabled.mechanisms=OAUTHBEARER", f"{KEYS}=file://host/b"), KEYS, "must be https"),
        (("listener.name.other.sasl.enabled.mechanisms=PLAIN",), "listener.name.other", "no listener of this name"),
        (("listener.name.DOOR.sasl.enabled.mechanisms=PLAIN",), "listener.name.DOOR.sasl", "name in lower case"),
        (("listener.name.door.num.partitions=1",), "listener.name.door.num.partitions", "unknown broker setting"),
        (("listener.name.door.sasl.enabled.mechanisms=X",), "listener.name.door.sasl", "must be a list of PLAIN"),
    ],
)
def test_invalid_security_setting_is_refused_by_name(more: tuple[str, ...], named: str, reason: str) -> None:
    if named.startswith("listener.name.other"):
        more = (*more, "sasl.enabled.mechanisms=SCRAM-SHA-256")
    with pytest.raises(ConfigurationError, match=reason) as refused:
        loaded(*more)
    assert str(refused.value).startswith(named)


def test_access_tokens_by_listener_and_by_mechanism() -> None:
    sasl = security(
        "sasl.enabled.mechanisms=OAUTHBEARER",
        f"{KEYS}=https://issuer/keys",
        f"listener.name.door.{KEYS}=file:///keys",
        "sasl.oauthbearer.expected.audience=a,b",
        "listener.name.door.oauthbearer.sasl.oauthbearer.sub.claim.name=client",
        "listener.name.door.oauthbearer.sasl.jaas.config="
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;",
    ).sasl
    assert sasl is not None
    assert sasl.oauthbearer is not None
    assert (sasl.oauthbearer.jwks_url, sasl.oauthbearer.audiences) == ("file:///keys", ("a", "b"))
    assert (sasl.oauthbearer.subject_claim, sasl.oauthbearer.clock_skew_s) == ("client", 30)


def test_secrets_are_shown_nowhere() -> None:
    configuration = loaded("sasl.enabled.mechanisms=PLAIN", f'{JAAS}={MODULE} required user_alice="hush";')
    assert [value.text for value in configuration.values if value.name == JAAS] == [HIDDEN]
    with pytest.raises(ConfigurationError) as refused:
        loaded("sasl.enabled.mechanisms=PLAIN", f'{JAAS}={MODULE} required user_alice="hush"')
    assert "hush" not in str(refused.value)


def test_one_environment_variable_may_hold_several_settings() -> None:
    text = f'{MODULE} required user_alice="hush";'
    configuration = load({}, BASE, {"SLUICE_SET": f"sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256\n{JAAS}={text}"})
    sasl = listener_security(configuration.settings.listeners[0], configuration.settings.broker).sasl
    assert sasl is not None
    assert sasl.plain_users == {"alice": "hush"}


TLS = ("listeners=DOOR://127.0.0.1:9092", "listener.security.protocol.map=DOOR:SSL")


@pytest.mark.parametrize(
    ("more", "named", "reason"),
    [
        ((), "ssl.keystore.location", "needs a certificate"),
        (("ssl.keystore.key=k",), "ssl.keystore.location", "needs a certificate"),
        (("ssl.keystore.location=a", "ssl.keystore.key=k"), "ssl.keystore.location", "also given as text"),
        (
            ("ssl.keystore.location=a", "ssl.client.auth=required"),
            "ssl.truststore.location",
            "must give their authority",
        ),
        (("ssl.keystore.location=a", "ssl.keystore.password=p"), "ssl.keystore.password", "a PEM file has no password"),
        (
            ("ssl.keystore.location=a", "ssl.truststore.password=p"),
            "ssl.truststore.password",
            "a PEM file has no password",
        ),
        (("ssl.keystore.location=a", "ssl.keystore.type=JKS"), "ssl.keystore.type", "must be one of: PEM"),
        (("ssl.keystore.location=a", "ssl.enabled.protocols=TLSv1.1"), "ssl.enabled.protocols", "must be a list"),
        (
            ("ssl.keystore.location=a", "ssl.truststore.location=b", "ssl.truststore.certificates=c"),
            "ssl.truststore.location",
            "also given as text",
        ),
    ],
)
def test_invalid_tls_setting_is_refused_by_name(more: tuple[str, ...], named: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as refused:
        load({}, (*TLS, *more), {})
    assert str(refused.value).startswith(named)


def test_passwords_of_stores_are_checked_if_tls_is_used() -> None:
    """Kafka does the same: its brokers without TLS start with any such value."""
    configuration = load({}, ("ssl.truststore.password=hush",), {})
    (value,) = [value for value in configuration.values if value.name == "ssl.truststore.password"]
    assert value.text == HIDDEN


def test_keys_are_shown_nowhere() -> None:
    given = ("listener.name.door.ssl.keystore.key=hush", "ssl.keystore.certificate.chain=hush", "ssl.key.password=hush")
    configuration = load({}, (*TLS, *given), {})
    assert "hush" not in str(configuration.values)
    assert {value.text for value in configuration.values if "ssl" in value.name} == {HIDDEN}
