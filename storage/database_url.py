"""A database's URL, split by its own grammar.

The one idea: a URL of Postgres may name several hosts, IPv6 addresses among them. The grammar of `urllib.parse` does
not cover that, and its result differs between Python's releases. asyncpg uses `urllib.parse` too, so we hand such hosts
to asyncpg in the query, which that parser leaves alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote

_URL = re.compile(
    r"(?P<scheme>postgres(?:ql)?)://(?:(?P<login>[^@/?#\[\]]*)@)?(?P<hosts>[^@/?#]*)"
    r"(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?:\[[^@\[\]]+\]|[^:@\[\]]+)(?::(?P<port>[^:]*))?")


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """The parts of the URL as they were written, still quoted. Each host has its port. The list of hosts is empty if
    the query names a socket.
    """

    scheme: str
    login: str | None
    hosts: tuple[str, ...]
    path: str
    query: str

    @property
    def for_asyncpg(self) -> str:
        """Return the URL in a form that asyncpg and every supported Python read in the same way."""
        login = "" if self.login is None else f"{self.login}@"
        if len(self.hosts) < 2 or not any("[" in host for host in self.hosts):
            query = f"?{self.query}" if self.query else ""
            return f"{self.scheme}://{login}{','.join(self.hosts)}{self.path}{query}"
        query = f"{self.query}&" if self.query else ""
        return f"{self.scheme}://{login}{self.path or '/'}?{query}host={quote(','.join(self.hosts), safe=',')}"

    def without_password(self) -> tuple[str, str | None]:
        """Return the URL for an argument list, which every user of the machine can read, and the password that it had.

        Raise ValueError if it has `sslpassword`, for which libpq knows no other place.
        """
        user, _, password = (self.login or "").partition(":")
        found = unquote(password) if password else None
        kept: list[str] = []
        for part in filter(None, self.query.split("&")):
            name, _, value = part.partition("=")
            if unquote(name) == "sslpassword":
                raise ValueError("every user of this machine would see sslpassword: use a key without a password")
            if unquote(name) == "password":
                found = unquote(value)
            else:
                kept.append(part)
        login = "" if self.login is None else f"{user}@"
        query = f"?{'&'.join(kept)}" if kept else ""
        return f"{self.scheme}://{login}{','.join(self.hosts)}{self.path}{query}", found


def parse_database_url(text: str) -> DatabaseUrl:
    """Parse a URL. Raise ValueError, without any part of the URL in it, if Postgres' clients would not accept it."""
    found = _URL.fullmatch(text)
    if found is None:
        raise ValueError("not a URL of a Postgres database")
    hosts = tuple(found["hosts"].split(",")) if found["hosts"] else ()
    query = found["query"] or ""
    matches = [_HOST.fullmatch(host) for host in hosts]
    ports = [match["port"] for match in matches if match and match["port"] is not None]
    ports += [port for name, value in parse_qsl(query) if name == "port" for port in value.split(",")]
    if not all(matches) or not all(_is_port(port) for port in ports):
        raise ValueError("a host or a port of the URL is malformed")
    return DatabaseUrl(found["scheme"], found["login"], hosts, found["path"] or "", query)


def _is_port(text: str) -> bool:
    return re.fullmatch(r"\d{1,5}", text, re.ASCII) is not None and 0 < int(text) < 65536
