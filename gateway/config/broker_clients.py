"""Broker settings of clients: the authorizer, connections, authentication, TLS, and the console."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from gateway.config.definition import (
    MAX_INT,
    ConfigType,
    Update,
    at_least,
    between,
    each_one_of,
    one_of,
    setting,
    some_of,
)
from gateway.config.listeners import parse_address
from gateway.config.mechanisms import LOGIN_MODULES

_INT, _LONG, _BOOLEAN = ConfigType.INT, ConfigType.LONG, ConfigType.BOOLEAN
_AT_START, _OF_ONE_NODE = Update.AT_START, Update.OF_ONE_NODE

STANDARD_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


def ip_overrides(text: str) -> dict[str, int]:
    """Parse `10.0.0.1:20,::1:5`. Raise ValueError. Host names are not resolved."""
    overrides: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        address, _, count = part.rpartition(":")
        if not count.isascii() or not count.isdigit():
            raise ValueError(f"expected ADDRESS:NUMBER, not {part}")
        overrides[str(ip_address(address))] = int(count)
    return overrides


def _ip_overrides(text: str) -> str | None:
    try:
        ip_overrides(text)
    except ValueError as error:
        return str(error)
    return None


def principals(text: str) -> frozenset[str]:
    """Parse `User:a;User:b`. Raise ValueError."""
    users = frozenset(user for part in text.split(";") if (user := part.strip()))
    for user in users:
        kind, _, name = user.partition(":")
        if not (kind and name):
            raise ValueError(f"expected a string in format principalType:principalName but got {user}")
    return users


def _principals(text: str) -> str | None:
    try:
        principals(text)
    except ValueError as error:
        return str(error)
    return None


def _address_or_empty(text: str) -> str | None:
    try:
        if not text or parse_address(text)[0]:
            return None
    except ValueError as error:
        return str(error)
    return "must be HOST:PORT, or empty"


def _http_or_empty(url: str) -> str | None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return str(error)
    if not url or (parts.scheme in ("http", "https") and parts.hostname and parts.username is None):
        return None
    return "must be an http or https URL without a user, or empty"


def _key_url(url: str | None) -> str | None:
    try:
        parts = urlsplit(url or "")
    except ValueError as error:
        return str(error)
    if parts.scheme in ("http", "https") and parts.hostname:
        return None
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return None
    return "must be https://HOST/PATH, http://HOST/PATH or file:///PATH"


def _not_blank(text: str) -> str | None:
    return None if text.strip() else "must not be empty"


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Settings of connections and of what clients may do."""

    # security
    authorizer_class_name: str = setting(
        ConfigType.STRING,
        "",
        "What decides who may do what: ACLs by Kafka's StandardAuthorizer, or nothing. The same on every node.",
        one_of("", STANDARD_AUTHORIZER),
        update=_AT_START,
    )
    super_users: str = setting(
        ConfigType.STRING,
        "",
        "Principals that may do everything, as User:alice;User:bob. The same on every node.",
        _principals,
        update=_AT_START,
    )
    allow_everyone_if_no_acl_found: bool = setting(
        _BOOLEAN,
        False,
        "Whether a resource without any ACL is open to every client. The same on every node.",
        update=_AT_START,
    )

    # connections
    fetch_max_bytes: int = setting(
        _INT, 57_671_680, "Most record bytes in one Fetch response.", at_least(1024), update=_AT_START
    )
    socket_request_max_bytes: int = setting(
        _INT, 104_857_600, "Largest request; a larger one closes its connection.", at_least(1), update=_AT_START
    )
    connections_max_idle_ms: int = setting(
        _LONG, 600_000, "How long an idle connection stays open; -1 is for ever.", at_least(-1), update=_AT_START
    )
    max_connections: int = setting(
        _INT, MAX_INT, "Most client connections at once on one node.", at_least(0), update=_AT_START
    )
    max_connections_per_ip: int = setting(
        _INT, MAX_INT, "Most connections at once from one address on one node.", at_least(0)
    )
    max_connections_per_ip_overrides: str = setting(
        ConfigType.STRING, "", "The same for single addresses, as 10.0.0.1:20,10.0.0.2:5.", _ip_overrides
    )

    sasl_enabled_mechanisms: tuple[str, ...] = setting(
        ConfigType.LIST,
        (),
        f"Mechanisms by which clients may authenticate: {', '.join(LOGIN_MODULES)}.",
        each_one_of(*LOGIN_MODULES),
        update=_AT_START,
    )
    sasl_server_max_receive_size: int = setting(
        _INT, 524_288, "Largest request of a client that has not authenticated yet.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_jwks_endpoint_url: str | None = setting(
        ConfigType.STRING,
        None,
        "Where the node reads the keys that sign access tokens, as a JWK set: https://, http:// or file://.",
        _key_url,
        update=_AT_START,
    )
    sasl_oauthbearer_jwks_endpoint_refresh_ms: int = setting(
        _LONG, 3_600_000, "How old the keys of access tokens may be.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_ms: int = setting(
        _LONG, 100, "Wait after the keys of access tokens could not be read.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms: int = setting(
        _LONG, 10_000, "Longest of these waits, which double.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_expected_audience: tuple[str, ...] = setting(
        ConfigType.LIST,
        (),
        "Audiences of which an access token must name one; if empty, a token may name no audience.",
        update=_AT_START,
    )
    sasl_oauthbearer_expected_issuer: str | None = setting(
        ConfigType.STRING, None, "Who must have issued an access token.", update=_AT_START
    )
    sasl_oauthbearer_clock_skew_seconds: int = setting(
        _INT, 30, "How far the issuer's clock may be from the node's.", at_least(0), update=_AT_START
    )
    sasl_oauthbearer_scope_claim_name: str = setting(
        ConfigType.STRING, "scope", "The claim of an access token that has its scopes.", _not_blank, update=_AT_START
    )
    sasl_oauthbearer_sub_claim_name: str = setting(
        ConfigType.STRING, "sub", "The claim of an access token that names the user.", _not_blank, update=_AT_START
    )
    connections_max_reauth_ms: int = setting(
        _LONG,
        0,
        "How long an authenticated client may stay connected until it authenticates again; 0: for ever.",
        at_least(0),
        update=_AT_START,
    )
    delegation_token_secret_key: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "Key from which the secrets of delegation tokens are derived; empty: no tokens. The same on every node.",
        update=_AT_START,
    )
    delegation_token_max_lifetime_ms: int = setting(
        _LONG,
        604_800_000,
        "How long a delegation token can be valid, with all renewals.",
        at_least(1),
        update=_AT_START,
    )
    delegation_token_expiry_time_ms: int = setting(
        _LONG,
        86_400_000,
        "How long a delegation token is valid until it must be renewed.",
        at_least(1),
        update=_AT_START,
    )
    delegation_token_expiry_check_interval_ms: int = setting(
        _LONG, 3_600_000, "How often expired delegation tokens are removed.", at_least(1), update=_AT_START
    )
    connection_failed_authentication_delay_ms: int = setting(
        _INT,
        100,
        "How long a client that failed to authenticate waits for the answer and the end of its connection.",
        between(0, 60_000),
        update=_AT_START,
    )
    ssl_keystore_type: str = setting(
        ConfigType.STRING, "PEM", "Format of the key and the certificates: PEM.", one_of("PEM"), update=_OF_ONE_NODE
    )
    ssl_keystore_location: str | None = setting(
        ConfigType.STRING, None, "A PEM file with the private key and the certificate chain.", update=_OF_ONE_NODE
    )
    ssl_keystore_certificate_chain: str | None = setting(
        ConfigType.PASSWORD, None, "The certificate chain as PEM text.", update=_OF_ONE_NODE
    )
    ssl_keystore_key: str | None = setting(
        ConfigType.PASSWORD, None, "The private key as PEM text (PKCS #8).", update=_OF_ONE_NODE
    )
    ssl_keystore_password: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "Refused if a listener speaks TLS: a PEM file has no password, and its key's is ssl.key.password.",
        update=_OF_ONE_NODE,
    )
    ssl_key_password: str | None = setting(
        ConfigType.PASSWORD, None, "The password of an encrypted private key.", update=_OF_ONE_NODE
    )
    ssl_truststore_type: str = setting(
        ConfigType.STRING, "PEM", "Format of the certificates of authorities: PEM.", one_of("PEM"), update=_OF_ONE_NODE
    )
    ssl_truststore_location: str | None = setting(
        ConfigType.STRING,
        None,
        "A PEM file with the certificates of authorities that clients' certificates are checked by.",
        update=_OF_ONE_NODE,
    )
    ssl_truststore_certificates: str | None = setting(
        ConfigType.PASSWORD, None, "The same as PEM text.", update=_OF_ONE_NODE
    )
    ssl_truststore_password: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "Refused if a listener speaks TLS: a PEM file of certificates has no password.",
        update=_OF_ONE_NODE,
    )
    ssl_client_auth: str = setting(
        ConfigType.STRING,
        "none",
        "Whether clients must show a certificate (required), may (requested), or are not asked (none).",
        one_of("required", "requested", "none"),
        update=_AT_START,
    )
    ssl_enabled_protocols: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("TLSv1.2", "TLSv1.3"),
        "Versions of TLS that are spoken.",
        some_of("TLSv1.2", "TLSv1.3"),
        update=_AT_START,
    )
    ssl_principal_mapping_rules: str = setting(
        ConfigType.STRING,
        "DEFAULT",
        "How a certificate's distinguished name becomes a user: rules RULE:pattern/replacement/[LU] and DEFAULT, "
        "separated by commas; the first that matches counts.",
        update=_AT_START,
    )

    # console
    console_listen: str = setting(
        ConfigType.STRING,
        "127.0.0.1:8080",
        "Where the console is served, as HOST:PORT; empty for no console. If the default port is taken, the node "
        "starts without a console. Not a Kafka setting.",
        _address_or_empty,
        update=_AT_START,
    )
    console_read_only: bool = setting(
        _BOOLEAN,
        False,
        "Whether the console refuses to change anything. Not a Kafka setting.",
        update=_AT_START,
    )
    console_produce: str = setting(
        ConfigType.STRING,
        "auto",
        "Whether the console may append records: true, false, or auto, which is true without an authorizer. Not a "
        "Kafka setting.",
        one_of("auto", "true", "false"),
        update=_AT_START,
    )
    console_plaintext_allow: bool = setting(
        _BOOLEAN,
        False,
        "Whether the console may listen on a non-loopback address without TLS, for a proxy in front of it that has "
        "TLS. Not a Kafka setting.",
        update=_AT_START,
    )
    console_ssl_keystore_location: str = setting(
        ConfigType.STRING,
        "",
        "PEM file with the private key and the certificate chain of the console; empty for no TLS. Not a Kafka "
        "setting.",
        update=_AT_START,
    )

    console_schema_registry_url: str = setting(
        ConfigType.STRING,
        "",
        "URL of a Confluent-compatible schema registry by whose schemas the console decodes records; empty for none. "
        "Not a Kafka setting.",
        _http_or_empty,
        update=_AT_START,
    )
    console_schema_registry_login: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "User and password of the console for the schema registry, as USER:PASSWORD. Not a Kafka setting.",
        update=_AT_START,
    )

    console_oidc_issuer: str = setting(
        ConfigType.STRING,
        "",
        "Issuer of the OpenID Connect provider to which the console sends people who log in; empty for none. Not a "
        "Kafka setting.",
        _http_or_empty,
        update=_AT_START,
    )
    console_oidc_client_id: str = setting(
        ConfigType.STRING,
        "",
        "Client id of the console at the OpenID Connect provider. Not a Kafka setting.",
        update=_AT_START,
    )
    console_oidc_client_secret: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "Secret of the console at the OpenID Connect provider; none for a public client. Not a Kafka setting.",
        update=_AT_START,
    )
    console_oidc_redirect_uri: str = setting(
        ConfigType.STRING,
        "",
        "URL of the console for browsers, followed by /api/oidc/callback; empty on a loopback address. Not a Kafka "
        "setting.",
        _http_or_empty,
        update=_AT_START,
    )
    console_oidc_scopes: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("openid",),
        "Scopes that the console requests from the OpenID Connect provider. Not a Kafka setting.",
        update=_AT_START,
    )
    console_oidc_session_ms: int = setting(
        _LONG,
        3_600_000,
        "Time after which a person who logged in by OpenID Connect must log in again. Not a Kafka setting.",
        between(60_000, 30 * 86_400_000),
        update=_AT_START,
    )
