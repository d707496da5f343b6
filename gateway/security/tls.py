"""TLS of a listener: its context from PEM, the log of failed handshakes, and the principal of a certificate.

The one idea: every mistake in keys and certificates is found at start. Failures of clients are logged once per second
at most, and always counted.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import stat
import tempfile
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError
from gateway.config.listeners import Listener
from gateway.config.security import TlsSettings, is_altered, listener_security
from gateway.net.context import ANONYMOUS, Principal
from gateway.security.names import mapped, parse_rules, subject

logger = structlog.stdlib.get_logger(__name__)

MAX_HANDSHAKES = 500
"""Handshakes under way at once at one listener; each takes some tens of kilobytes and milliseconds."""
MAX_FILE_BYTES = 4 * 1024 * 1024
"""Largest file of keys or certificates."""
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_CLIENT_AUTH = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_PEM = re.compile(r"(-----BEGIN [A-Z ]+-----)(.*?)(-----END [A-Z ]+-----)", re.DOTALL)

Failed = Callable[[str], None]
"""Called with the reason of a failed handshake."""


class _Handshakes(ssl.SSLObject):
    """Report the reason of a failed handshake, which asyncio does not expose."""

    is_given_up = False

    def do_handshake(self) -> None:
        context = self.context
        assert isinstance(context, ListenerContext)
        if self.is_given_up:
            raise ssl.SSLError("too many handshakes at once")
        context.take_place(self)
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            context.pending.pop(id(self), None)
            context.failed(_reason(error))
            raise
        context.pending.pop(id(self), None)


class ListenerContext(ssl.SSLContext):
    """Server-side TLS context of one listener."""

    sslobject_class = _Handshakes
    pending: dict[int, weakref.ref[_Handshakes]]
    """Handshakes that have begun, the oldest first."""
    failed: Failed
    successor: ListenerContext | None = None
    """Context with newer keys and certificates, which new handshakes use. None until certificates have changed."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Create the TLS object of a new connection; asyncio calls this for each one."""
        context = self.successor or self
        return ssl.SSLContext.wrap_bio(context, incoming, outgoing, server_side, server_hostname, session)

    def take_place(self, handshake: _Handshakes) -> None:
        """Register the handshake. If too many are under way, give up the oldest: silent clients must not keep others
        out."""
        key, pending = id(handshake), self.pending
        if key in pending:
            return
        while len(pending) >= MAX_HANDSHAKES:
            oldest = pending.pop(next(iter(pending)))()
            if oldest is not None:
                oldest.is_given_up = True
                self.failed("too many handshakes at once")
        pending[key] = weakref.ref(handshake, lambda _: pending.pop(key, None) and None)


def _reason(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return f"{reason}: the client speaks no TLS, or another version"
    return reason


def make_context(settings: TlsSettings, failed: Failed) -> ListenerContext:
    """Make a context from the files that the settings name. ConfigError names the setting with unusable keys or
    certificates."""
    _check_file("ssl.keystore.location", settings.key_file)
    _check_file("ssl.truststore.location", settings.trusted_file)
    context = ListenerContext(ssl.PROTOCOL_TLS_SERVER)
    context.pending, context.failed = {}, failed
    versions = sorted(_VERSIONS[name] for name in settings.protocols)
    context.minimum_version, context.maximum_version = versions[0], versions[-1]
    context.options |= ssl.OP_NO_RENEGOTIATION
    with _key_file(settings) as path:
        try:
            context.load_cert_chain(path, password=lambda: settings.key_password or "")
        except (OSError, ssl.SSLError, TypeError, ValueError) as error:
            raise ConfigError(
                "ssl.keystore.location", settings.key_file, _why(error, "no key with its chain")
            ) from error
    context.verify_mode = _CLIENT_AUTH[settings.client_auth]
    if settings.trusted_file is not None or settings.trusted is not None:
        try:
            if settings.trusted_file is not None:
                context.load_verify_locations(cafile=settings.trusted_file)
            else:
                context.load_verify_locations(cadata=_pem(settings.trusted or ""))
        except (OSError, ssl.SSLError, TypeError, ValueError) as error:
            why = _why(error, "no certificates")
            raise ConfigError("ssl.truststore.location", settings.trusted_file, why) from error
    return context


def make_client_context(settings: TlsSettings) -> ssl.SSLContext:
    """Make the context by which this node calls other nodes at the same listener. The nodes present the listener's
    certificates to each other, and check each other's by its truststore. Raise ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if settings.trusted_file is not None:
            context.load_verify_locations(cafile=settings.trusted_file)
        else:
            context.load_verify_locations(cadata=_pem(settings.trusted or ""))
        with _key_file(settings) as path:
            context.load_cert_chain(path, password=lambda: settings.key_password or "")
    except (OSError, ssl.SSLError, TypeError, ValueError) as error:
        raise ConfigError("ssl.truststore.location", settings.trusted_file, _why(error, "no certificates")) from error
    return context


@dataclass(slots=True)
class _Served:
    """A TLS listener, the context with which its connections are made, and the settings in force."""

    listener: Listener
    context: ListenerContext
    settings: TlsSettings


class Certificates:
    """Certificates of the node's TLS listeners. Each listener may get new ones while it serves (KIP-226)."""

    def __init__(self) -> None:
        self._served: list[_Served] = []
        self._client: tuple[ListenerContext, ssl.SSLContext] | None = None

    def add(self, listener: Listener, context: ListenerContext, settings: TlsSettings) -> None:
        """Add a context with which the listener's connections are made."""
        self._served.append(_Served(listener, context, settings))

    def between_nodes(self) -> ssl.SSLContext | None:
        """Return the context by which this node calls others with the certificates in use. Return None if nodes call
        each other without TLS. Raise ConfigError."""
        for each in self._served:
            if each.listener.is_inter_broker:
                current = each.context.successor or each.context
                if self._client is None or self._client[0] is not current:
                    self._client = current, make_client_context(each.settings)
                return self._client[1]
        return None

    @property
    def files(self) -> list[str]:
        """Files with the keys and certificates in use."""
        named = [file for each in self._served for file in (each.settings.key_file, each.settings.trusted_file)]
        return [file for file in named if file is not None]

    async def read(self, broker: BrokerConfig, *, every: bool = False) -> Callable[[], None]:
        """Read the certificates that `broker` names: those of `every` listener, else of listeners whose settings were
        altered, now or before. The returned function puts them into use for later connections. Raise ConfigError if
        they cannot be used."""
        made: list[tuple[_Served, ListenerContext, TlsSettings]] = []
        for each in self._served:
            if not every and each.context.successor is None and not is_altered(each.listener, broker):
                continue
            settings = listener_security(each.listener, broker).tls
            assert settings is not None
            successor = await asyncio.to_thread(make_context, settings, each.context.failed)
            successor.pending = each.context.pending
            made.append((each, successor, settings))

        def use() -> None:
            for each, successor, settings in made:
                each.context.successor, each.settings = successor, settings
            if made:
                logger.info("certificates were read again", listeners=len(made))

        return use

    async def begin(self, broker: BrokerConfig) -> None:
        """Put into use what was altered before this start. If it cannot be used, the settings given at start apply."""
        try:
            (await self.read(broker))()
        except ConfigError as error:
            logger.error(
                "stored certificates refused: using those given at start; correct ssl.* by kafka-configs",
                error=str(error),
            )


def _check_file(setting: str, path: str | None) -> None:
    """Refuse everything but a regular file: reading a pipe or a device may never end, and could not be stopped."""
    if path is None:
        return
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(setting, path, error.strerror or str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(setting, path, "must be a file")
    if found.st_size > MAX_FILE_BYTES:
        raise ConfigError(setting, path, f"has more than {MAX_FILE_BYTES} bytes")


def _why(error: Exception, what: str) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    return f"{what} in PEM, or another password"


@contextmanager
def _key_file(settings: TlsSettings) -> Generator[str]:
    """Yield the path of a file with the key, because Python reads keys only from files. A key given as text is
    written to a file that no other user can read, and that exists only while it is read."""
    if settings.key_file is not None:
        yield settings.key_file
        return
    descriptor, path = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(_pem(settings.key) + _pem(settings.certificate_chain))
        yield path
    finally:
        os.unlink(path)


def _pem(text: str) -> str:
    """Restore the line breaks that OpenSSL needs: a text in a setting may have arrived as one line."""
    return "".join(
        f"{head}\n" + "".join(f"{line}\n" for line in body.split()) + f"{end}\n" if ":" not in body else found
        for found, head, body, end in ((match[0] + "\n", *match.groups()) for match in _PEM.finditer(text))
    )


def identify_by(settings: TlsSettings) -> Callable[[ssl.SSLObject], Principal]:
    """Return a function from a connection's `ssl_object` to its principal, for a listener that asks for no other
    proof. Raise ConfigError if the rules cannot be parsed. The returned function raises UnusableNameError for a
    certificate whose name no rule matches."""
    try:
        rules = parse_rules(settings.principal_rules)
    except ValueError as error:
        raise ConfigError("ssl.principal.mapping.rules", settings.principal_rules, str(error)) from error

    def identify(ssl_object: ssl.SSLObject) -> Principal:
        certificate = ssl_object.getpeercert(binary_form=True) if settings.client_auth != "none" else None
        return ANONYMOUS if certificate is None else Principal(mapped(subject(certificate), rules))

    return identify
