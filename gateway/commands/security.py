"""Authentication of a command to a broker: the properties of Kafka's tools (`--command-config`).

The one idea: the file that serves kafka-topics.sh serves here, if its keys and certificates are PEM.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.commands.certificates import not_after
from gateway.commands.errors import CommandError
from gateway.config.jaas import PLAIN_MODULE, SCRAM_MODULE, parse_jaas

if TYPE_CHECKING:
    from gateway.security.scram import ScramMechanism

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
NONCE_BYTES = 24

Send = Callable[[bytes], bytes]
"""Sends a token to the broker and returns its answer. Raises CommandError if the broker refuses the token."""


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """The steps of a connection before its first request."""

    tls: ssl.SSLContext | None = None
    mechanism: str | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    file: str | None = None
    """The file from which the properties were read."""
    expires: datetime | None = None
    """End of the client certificate's validity. None if there is no client certificate."""

    @property
    def _place(self) -> str:
        return "--command-config FILE" if self.file is None else self.file

    def advice(self, error: OSError) -> str:
        """Return the next step after a broker closed the connection or broke off the TLS handshake; empty if the
        next step is unknown."""
        if isinstance(error, TimeoutError):
            return "--timeout gives it longer"
        if isinstance(error, ssl.SSLCertVerificationError):
            match error.verify_code:
                case 10:  # X509_V_ERR_CERT_HAS_EXPIRED
                    return "give the broker another certificate"
                case 62 | 64:  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
                    return "name the broker with --bootstrap as its certificate does"
                case _:
                    return f"name the CA of its certificate in {self._place}: ssl.truststore.location (PEM)"
        if self.tls is None:
            protocols = "SASL_PLAINTEXT or SASL_SSL" if self.mechanism is None else "SASL_SSL"
            asked = "TLS or SASL" if self.mechanism is None else "TLS"
            return f"the listener may want {asked}: set security.protocol to SSL, {protocols} in {self._place}"
        if isinstance(error, ssl.SSLError) and "ALERT" not in (error.reason or ""):
            return f"the listener may speak no TLS: check security.protocol in {self._place}"
        if self.expires is not None and self.expires < datetime.now(UTC):
            moment = self.expires.isoformat().replace("+00:00", "Z")
            return f"the client certificate expired at {moment}: renew ssl.keystore.location of {self._place}"
        asked = "a client certificate (ssl.keystore.location)"
        if self.mechanism is None:
            asked += " or SASL (security.protocol=SASL_SSL)"
        return f"the listener may want {asked}: see {self._place}"

    def wrap(self, connected: socket.socket, host: str) -> socket.socket:
        """Wrap the socket in TLS if the properties demand it. Raise OSError."""
        return connected if self.tls is None else self.tls.wrap_socket(connected, server_hostname=host)

    def as_aiokafka(self) -> dict[str, Any]:
        """Return the same steps as arguments of aiokafka's clients."""
        protocol = "SSL" if self.tls is not None else "PLAINTEXT"
        if self.mechanism is None:
            return {"security_protocol": protocol, "ssl_context": self.tls}
        return {
            "security_protocol": f"SASL_{protocol}",
            "ssl_context": self.tls,
            "sasl_mechanism": self.mechanism,
            "sasl_plain_username": self.user,
            "sasl_plain_password": self.password,
        }

    def authenticate(self, send: Send) -> None:
        """Authenticate with the mechanism of the properties, if they name a mechanism."""
        if self.mechanism == "PLAIN":
            send(f"\0{self.user}\0{self.password}".encode())
        elif self.mechanism is not None:
            from gateway.security.scram import MECHANISMS

            _authenticate_by_scram(MECHANISMS[self.mechanism], self.user, self.password, send)


def _authenticate_by_scram(mechanism: ScramMechanism, user: str, password: str, send: Send) -> None:
    from gateway.security.scram import BASE64, MAX_ITERATIONS, MIN_ITERATIONS, salted_password

    nonce = base64.b64encode(secrets.token_bytes(NONCE_BYTES)).decode()
    bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
    first = send(f"n,,{bare}".encode()).decode(errors="replace")
    found = re.fullmatch(rf"r=([^,]+),s=({BASE64}),i=(\d{{1,9}})", first)
    # If an impostor could demand few iterations, it could guess the password from the proof much faster.
    if found is None or not found[1].startswith(nonce) or not MIN_ITERATIONS <= int(found[3]) <= MAX_ITERATIONS:
        raise CommandError("the broker's answer does not follow SCRAM")
    salted = salted_password(mechanism, password, base64.b64decode(found[2]), int(found[3]))
    client_key = hmac.digest(salted, b"Client Key", mechanism.hash_name)
    stored_key = hashlib.new(mechanism.hash_name, client_key).digest()
    without_proof = f"c=biws,r={found[1]}"
    signed = f"{bare},{first},{without_proof}".encode()
    signature = hmac.digest(stored_key, signed, mechanism.hash_name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    last = send(f"{without_proof},p={base64.b64encode(proof).decode()}".encode())
    server_key = hmac.digest(salted, b"Server Key", mechanism.hash_name)
    expected = b"v=" + base64.b64encode(hmac.digest(server_key, signed, mechanism.hash_name))
    if not hmac.compare_digest(last, expected):
        raise CommandError("the broker cannot prove that it knows the password: it may be an impostor")


def read_properties(path: str) -> ClientSecurity:
    """Read a file of Kafka's client properties, and ignore all that do not concern security. CommandError describes
    the mistake without repeating a value."""
    try:
        with open(path, encoding="utf-8") as file:
            properties = _parse(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    protocol = properties.get("security.protocol", "PLAINTEXT")
    if protocol not in PROTOCOLS:
        raise CommandError(f"{path}: security.protocol is one of {', '.join(PROTOCOLS)}")
    tls = _context(path, properties) if protocol.endswith("SSL") else None
    expires = None if tls is None else _expiry(properties)
    if not protocol.startswith("SASL_"):
        return ClientSecurity(tls, file=path, expires=expires)
    from gateway.security.scram import MECHANISMS

    mechanism = properties.get("sasl.mechanism", "")
    if mechanism != "PLAIN" and mechanism not in MECHANISMS:
        raise CommandError(f"{path}: sasl.mechanism is one of PLAIN, {', '.join(MECHANISMS)}")
    try:
        login = parse_jaas(properties.get("sasl.jaas.config", ""))
    except ValueError as error:
        raise CommandError(f"{path}: sasl.jaas.config: {error}") from None
    module = PLAIN_MODULE if mechanism == "PLAIN" else SCRAM_MODULE
    if login.name != module or not {"username", "password"} <= login.options.keys():
        raise CommandError(f"{path}: sasl.jaas.config: expected {module} with username and password")
    return ClientSecurity(tls, mechanism, login.options["username"], login.options["password"], path, expires)


def _context(path: str, properties: Mapping[str, str]) -> ssl.SSLContext:
    for kind in ("ssl.truststore.type", "ssl.keystore.type"):
        if properties.get(kind, "PEM") != "PEM":
            raise CommandError(f"{path}: {kind}: only PEM is read")
    if "ssl.keystore.key" in properties:
        raise CommandError(f"{path}: ssl.keystore.key is not read: name a file with the key by ssl.keystore.location")
    try:
        context = ssl.create_default_context(
            cafile=properties.get("ssl.truststore.location"), cadata=properties.get("ssl.truststore.certificates")
        )
        key = properties.get("ssl.keystore.location")
        if key is not None:
            context.load_cert_chain(key, password=lambda: properties.get("ssl.key.password", ""))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: a key or certificates cannot be used: {error}") from error
    context.check_hostname = properties.get("ssl.endpoint.identification.algorithm", "https") != ""
    return context


def _expiry(properties: Mapping[str, str]) -> datetime | None:
    """Return the end of the client certificate's validity; `_context` has already read the file."""
    path = properties.get("ssl.keystore.location")
    return None if path is None else not_after(Path(path).read_text(encoding="utf-8", errors="replace"))


def _parse(text: str) -> dict[str, str]:
    r"""Parse Java's properties, without its \uXXXX."""
    lines = re.sub(r"\\\r?\n[ \t]*", "", text).splitlines()
    properties: dict[str, str] = {}
    for line in lines:
        found = re.match(r"\s*([^\s#!=:][^\s=:]*)\s*[=:]?\s*(.*)", line)
        if found is not None:
            value = re.sub(r"\\(.)", lambda escape: {"n": "\n", "t": "\t"}.get(escape[1], escape[1]), found[2])
            properties[found[1]] = value.rstrip()
    return properties
