"""A `postgresql://` URL in the words of the JDBC driver."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from pipeline.errors import PipelineError

CONNECT_SECONDS = 30


def address(url: str, option: str) -> tuple[str, dict[str, str]] | None:
    """Return the JDBC URL and its properties, None for a Unix socket, which JDBC cannot use.

    User and password are properties, so that no plan shows them. PipelineError if `url`, the value of `option`, is no
    such URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise PipelineError(
            f"The value of {option} is no postgresql:// URL.", "Write it like postgresql://user:password@host/database."
        )
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host = query.pop("host", parts.hostname or "")
    if not host or host.startswith("/"):
        return None
    port = query.pop("port", parts.port or 5432)
    named = f"[{host}]" if ":" in host else host
    properties = {
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "ApplicationName": "sluice-pipeline",
        "connectTimeout": str(CONNECT_SECONDS),
        "sslmode": query.pop("sslmode", "prefer"),
    }
    return (
        f"jdbc:postgresql://{named}:{port}{parts.path or '/'}",
        {name: value for name, value in properties.items() if value},
    )
