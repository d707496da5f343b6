"""A `postgresql://` URL in the form of the JDBC driver."""

from __future__ import annotations

from urllib.parse import parse_qs, quote, unquote, urlsplit

from pipeline.errors import PipelineError

CONNECT_SECONDS = 30
_PASSED_ON = ("sslrootcert", "sslcert", "sslkey", "sslpassword", "options")
"""Parameters of a URL that the driver knows by the same names as libpq."""


def address(url: str, option: str) -> tuple[str, dict[str, str]] | None:
    """Return the JDBC URL and its properties, None for a Unix socket, which JDBC cannot use.

    User and password are properties, so that no Spark plan shows them. Raise PipelineError if `url`, the value of
    `option`, is no such URL. The error shows no part of the URL.
    """
    how = "Write it like postgresql://user:password@host/database, with %23 for # and %2F for / in a password."
    try:
        parts = urlsplit(url)
        # The message of urllib's own error would show a part of the password.
        port = parts.port or 5432
    except ValueError:
        raise PipelineError(f"The value of {option} is no URL with one host and one port.", how) from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise PipelineError(f"The value of {option} is no postgresql:// URL.", how)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host = query.get("host", parts.hostname or "")
    if not host or host.startswith("/"):
        return None
    database = quote(query["dbname"], safe="") if "dbname" in query else parts.path.removeprefix("/")
    named = f"[{host}]" if ":" in host else host
    properties = {
        "user": query.get("user", unquote(parts.username or "")),
        "password": query.get("password", unquote(parts.password or "")),
        "ApplicationName": "sluice-pipeline",
        "connectTimeout": str(CONNECT_SECONDS),
        "sslmode": query.get("sslmode", "prefer"),
        **{name: query[name] for name in _PASSED_ON if name in query},
    }
    return (
        f"jdbc:postgresql://{named}:{query.get('port', port)}/{database}",
        {name: value for name, value in properties.items() if value},
    )
