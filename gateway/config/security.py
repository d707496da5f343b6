"""How clients of one listener authenticate and encrypt, from Kafka's `sasl.*` and `ssl.*` settings.

The one idea: a listener has the broker's settings, except those given for it alone (`listener.name.NAME.…`). Among
these, the settings of one mechanism outrank the rest.

It opens no file: certificates are read by `gateway/security/tls.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.config.broker import BrokerConfig
from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.broker_table import JAAS_CONFIG
from gateway.config.definition import HIDDEN, ConfigError
from gateway.config.jaas import parse_jaas
from gateway.config.listeners import Listener
from gateway.config.mechanisms import LOGIN_MODULES, OAUTHBEARER, PLAIN

_USER = "user_"


@dataclass(frozen=True, slots=True)
class OAuthSettings:
    """Settings that decide which access tokens are accepted."""

    jwks_url: str
    """A URL of scheme https, http or file."""
    refresh_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    audiences: tuple[str, ...]
    issuer: str | None
    clock_skew_s: int
    scope_claim: str
    subject_claim: str


@dataclass(frozen=True, slots=True)
class SaslSettings:
    mechanisms: tuple[str, ...]
    """Enabled mechanisms, at least one, in the order given."""
    plain_users: Mapping[str, str]
    """Passwords by user. No password is shown or logged anywhere."""
    max_reauth_ms: Mapping[str, int]
    """Maximal length of sessions by mechanism, for mechanisms whose sessions end."""
    max_receive_bytes: int
    """Maximal size of a request before authentication."""
    oauthbearer: OAuthSettings | None = None
    """Settings of OAUTHBEARER, if this mechanism is enabled."""

    def __repr__(self) -> str:
        return f"SaslSettings(mechanisms={self.mechanisms}, {len(self.plain_users)} users)"


@dataclass(frozen=True, slots=True, repr=False)
class TlsSettings:
    key_file: str | None
    """PEM file with the private key and the certificate chain. None if key and chain are given as texts."""
    certificate_chain: str
    key: str
    key_password: str | None
    trusted_file: str | None
    trusted: str | None
    client_auth: str
    """One of the words required, requested and none."""
    protocols: tuple[str, ...]
    principal_rules: str


@dataclass(frozen=True, slots=True)
class ListenerSecurity:
    sasl: SaslSettings | None
    tls: TlsSettings | None


def is_altered(listener: Listener, broker: BrokerConfig) -> bool:
    """Return whether a setting of the listener was changed while the node was running."""
    return any(name.startswith(_prefix(listener)) for name in broker.own)


def listener_security(listener: Listener, broker: BrokerConfig) -> ListenerSecurity:
    """Return what a listener demands of its clients. ConfigError names the setting that is missing or wrong."""
    protocol = listener.security_protocol
    sasl = _sasl(listener, broker) if protocol.startswith("SASL_") else None
    tls = _tls(listener, broker) if protocol.endswith("SSL") else None
    return ListenerSecurity(sasl, tls)


def _prefix(listener: Listener) -> str:
    return f"listener.name.{listener.name.lower()}."


def _own(listener: Listener, broker: BrokerConfig) -> BrokerConfig:
    """Return the broker's settings, overridden by those of the listener. Settings altered for this node come first."""
    prefix = _prefix(listener)
    given = {**broker.static, **broker.own}
    own = {name.removeprefix(prefix): text for name, text in given.items() if name.startswith(prefix)}
    mechanisms = tuple(f"{mechanism.lower()}." for mechanism in LOGIN_MODULES)
    plain = {name: text for name, text in broker.static.items() if not name.startswith("listener.name.")}
    return parse_broker_configs(
        {**plain, **{name: text for name, text in own.items() if not name.startswith(mechanisms)}}
    )


def _sasl(listener: Listener, broker: BrokerConfig) -> SaslSettings:
    own, prefix = _own(listener, broker), _prefix(listener)
    if not own.sasl_enabled_mechanisms:
        raise ConfigError(
            "sasl.enabled.mechanisms", None, f"listener {listener.name} authenticates its clients: name the mechanisms"
        )
    users: dict[str, str] = {}
    max_reauth_ms: dict[str, int] = {}
    for mechanism in own.sasl_enabled_mechanisms:
        name = f"{prefix}{mechanism.lower()}.{JAAS_CONFIG}"
        if mechanism == PLAIN and name not in broker.static:
            raise ConfigError(name, None, f"PLAIN is enabled and knows no users: set {name}")
        if name in broker.static:
            found = _users(name, broker.static[name], LOGIN_MODULES[mechanism])
            users = found if mechanism == PLAIN else users
        name = f"{prefix}{mechanism.lower()}.connections.max.reauth.ms"
        limit_ms = own.connections_max_reauth_ms
        if name in broker.static:
            limit_ms = parse_broker_configs(
                {"connections.max.reauth.ms": broker.static[name]}
            ).connections_max_reauth_ms
        if limit_ms:
            max_reauth_ms[mechanism] = limit_ms
    return SaslSettings(
        own.sasl_enabled_mechanisms,
        users,
        max_reauth_ms,
        own.sasl_server_max_receive_size,
        _oauthbearer(listener, broker) if OAUTHBEARER in own.sasl_enabled_mechanisms else None,
    )


def _oauthbearer(listener: Listener, broker: BrokerConfig) -> OAuthSettings:
    """Return the settings of OAUTHBEARER. Raise ConfigError if no keys are named: upstream then accepts unsigned
    tokens, which prove nothing."""
    own, prefix = _own(listener, broker), f"{_prefix(listener)}{OAUTHBEARER.lower()}."
    of_mechanism = {
        name.removeprefix(prefix): text
        for name, text in broker.static.items()
        if name.startswith(prefix) and not name.endswith(JAAS_CONFIG)
    }
    own = parse_broker_configs({**own.static, **of_mechanism})
    url = own.sasl_oauthbearer_jwks_endpoint_url
    if url is None:
        raise ConfigError(
            "sasl.oauthbearer.jwks.endpoint.url",
            None,
            f"listener {listener.name} accepts access tokens (OAUTHBEARER): give the address of the keys that sign them"
            "; unsigned tokens are refused",
        )
    return OAuthSettings(
        jwks_url=url,
        refresh_ms=own.sasl_oauthbearer_jwks_endpoint_refresh_ms,
        retry_backoff_ms=own.sasl_oauthbearer_jwks_endpoint_retry_backoff_ms,
        retry_backoff_max_ms=own.sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms,
        audiences=own.sasl_oauthbearer_expected_audience,
        issuer=own.sasl_oauthbearer_expected_issuer,
        clock_skew_s=own.sasl_oauthbearer_clock_skew_seconds,
        scope_claim=own.sasl_oauthbearer_scope_claim_name,
        subject_claim=own.sasl_oauthbearer_sub_claim_name,
    )


def _users(name: str, text: str, module: str) -> dict[str, str]:
    try:
        login = parse_jaas(text)
    except ValueError as error:
        raise ConfigError(name, HIDDEN, str(error)) from None
    if login.name != module:
        raise ConfigError(name, HIDDEN, f"expected the module {module}")
    return {option[len(_USER) :]: value for option, value in login.options.items() if option.startswith(_USER)}


def _tls(listener: Listener, broker: BrokerConfig) -> TlsSettings:
    own = _own(listener, broker)
    chain, key = own.ssl_keystore_certificate_chain, own.ssl_keystore_key
    if own.ssl_keystore_location is None and (chain is None or key is None):
        raise ConfigError(
            "ssl.keystore.location",
            None,
            f"listener {listener.name} needs a certificate: a PEM file, or ssl.keystore.certificate.chain and "
            "ssl.keystore.key",
        )
    if own.ssl_keystore_location is not None and (chain is not None or key is not None):
        raise ConfigError(
            "ssl.keystore.location",
            own.ssl_keystore_location,
            "the certificate is also given as text: remove one of the two",
        )
    for name, password in (
        ("ssl.keystore.password", own.ssl_keystore_password),
        ("ssl.truststore.password", own.ssl_truststore_password),
    ):
        if password is not None:
            raise ConfigError(name, HIDDEN, "a PEM file has no password; a key's is ssl.key.password")
    trusted, trusted_file = own.ssl_truststore_certificates, own.ssl_truststore_location
    if trusted is not None and trusted_file is not None:
        raise ConfigError(
            "ssl.truststore.location", trusted_file, "the certificates are also given as text: remove one of the two"
        )
    if own.ssl_client_auth != "none" and trusted is None and trusted_file is None:
        raise ConfigError(
            "ssl.truststore.location",
            None,
            "ssl.client.auth asks for clients' certificates, and this setting must give their authority",
        )
    return TlsSettings(
        key_file=own.ssl_keystore_location,
        certificate_chain=chain or "",
        key=key or "",
        key_password=own.ssl_key_password,
        trusted_file=trusted_file,
        trusted=trusted,
        client_auth=own.ssl_client_auth,
        protocols=own.ssl_enabled_protocols,
        principal_rules=own.ssl_principal_mapping_rules,
    )
