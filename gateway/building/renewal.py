"""Keys, certificates and passwords in files: read again when a file changes, and put into use for later connections.

The one idea: the files' modification times are compared at an interval, not watched by the kernel. Kubernetes replaces
a mounted secret by a symbolic link, and a file system of a network announces nothing. The URL of the database is not
read here: each new connection reads it (`gateway/building/database.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import structlog

from gateway.config.broker_parsing import parse_stored
from gateway.config.broker_table import JAAS_CONFIG, find_broker_config
from gateway.config.definition import ConfigType
from gateway.config.mechanisms import PLAIN
from gateway.config.security import listener_security
from gateway.config.settings import Settings
from gateway.log.catalog import Catalog
from gateway.security.authenticator import ListenerSasl
from gateway.security.tls import Certificates

logger = structlog.get_logger(__name__)

INTERVAL_MS = 5_000
"""Interval between two checks of the files."""

_Mark = tuple[int, int, int] | None
"""Modification time, size and inode of a file. None if the file does not exist."""


class Renewal:
    """The secrets of a node that are read from files."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        certificates: Certificates,
        sasl: Mapping[str, ListenerSasl],
        altering: asyncio.Lock,
    ) -> None:
        """Take what uses the secrets. `altering` is held while a client alters this node's settings."""
        self._settings = settings
        self._catalog = catalog
        self._certificates = certificates
        self._sasl = sasl
        self._altering = altering
        self._marks: dict[Path, _Mark] = {}
        self._told: set[str] = set()

    async def look(self) -> None:
        """Read the files again if one of them has changed. Raise ConfigError or ConfigurationError if a file cannot be
        used: then nothing changes, and the next call tries again.
        """
        files = [*self._settings.sources.files, *map(Path, self._certificates.files)]
        if not files:
            return
        # Take the marks before the read, so that a file that changes during the read is read again.
        marks = await asyncio.to_thread(_marks, files)
        if marks == self._marks:
            return
        await self._renew()
        self._marks = marks

    async def _renew(self) -> None:
        loaded = await asyncio.to_thread(self._settings.sources.load)
        given = loaded.broker.static
        async with self._altering:
            broker = self._catalog.broker
            changed = {
                name for name in given.keys() | broker.static.keys() if given.get(name) != broker.static.get(name)
            }
            renewed = {name for name in changed if _is_renewable(name)}
            static = {name: text for name, text in broker.static.items() if name not in renewed}
            static |= {name: given[name] for name in renewed if name in given}
            broker, _ = parse_stored(static, broker.dynamic, broker.own)
            users = {
                listener.name: sasl.plain_users
                for listener in self._settings.listeners
                if (sasl := listener_security(listener, broker).sasl) is not None
            }
            use_certificates = await self._certificates.read(broker, every=True)
            use_certificates()
            for name, shared in self._sasl.items():
                shared.renew_users(users[name])
            if renewed:
                # The other nodes may have altered settings while the certificates were read.
                now = self._catalog.broker
                self._catalog.set_broker(parse_stored(static, now.dynamic, now.own)[0])
                logger.info("settings were read again from their files", settings=sorted(renewed))
        later = (changed - renewed | _changed_options(self._settings, loaded)) - self._told
        if later:
            self._told |= later
            logger.warning("settings changed in a file; they take effect at the next start", settings=sorted(later))


def _changed_options(before: Settings, now: Settings) -> set[str]:
    """Return the names of the options that differ, except a URL that each new connection reads in its file."""
    followed = {"broker"} if before.database_url_file is None else {"broker", "database_url"}
    names = {field.name for field in fields(Settings) if field.compare} - followed
    return {name.replace("_", "-") for name in names if getattr(before, name) != getattr(now, name)}


def _is_renewable(name: str) -> bool:
    """True for keys and certificates as text, their passwords, and the users of PLAIN."""
    if name.endswith(f".{PLAIN.lower()}.{JAAS_CONFIG}"):
        return True
    key = find_broker_config(name)
    return key is not None and key.type is ConfigType.PASSWORD and ("ssl." in name)


def _marks(files: Iterable[Path]) -> dict[Path, _Mark]:
    return {file: _mark(file) for file in files}


def _mark(file: Path) -> _Mark:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
