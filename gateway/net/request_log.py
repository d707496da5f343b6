"""Log a line for every answered request if the level of `kafka.request.logger` is DEBUG (KIP-412).

The one idea: this log has a logger of its own, so that the level of one logger turns it on alone. The line does not
show the request's contents, which may be a record or a password.
"""

from __future__ import annotations

import structlog

from gateway.net.context import ConnectionInfo
from protocol.headers import RequestHeader

logger = structlog.stdlib.get_logger(__name__)


def tell(header: RequestHeader, connection: ConnectionInfo, seconds: float, code: int, answer_bytes: int) -> None:
    """Log one answered request. `code` is the answer's own error code, 0 if each element has its own. The line names
    the API, the connection and the correlation id, as every line of a request does."""
    logger.debug(
        "request answered",
        version=header.api_version,
        client_id=header.client_id,
        principal=str(connection.principal),
        listener=connection.listener,
        took_ms=round(seconds * 1000, 3),
        error_code=int(code),
        answer_bytes=answer_bytes,
    )
