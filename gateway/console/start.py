"""Start the console of a node, if the node has one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog

from gateway.cluster.figures import NodeFigures
from gateway.config.definition import ConfigError
from gateway.config.security import listener_security
from gateway.console.kafka import ConsoleServices, Handles, Kafka
from gateway.security.authenticator import Users
from storage.pool import Database

if TYPE_CHECKING:
    from gateway.console.server import Console

logger = structlog.get_logger(__name__)

PushUndo = Callable[[str, float, Callable[[], Awaitable[object]]], None]
"""Takes the name of a step that stopping the node runs, its limit in seconds, and the step."""


async def start_console(
    dispatch: Handles,
    services: ConsoleServices,
    users: Users,
    database: Database,
    figures: NodeFigures,
    undo: PushUndo,
) -> Console | None:
    """Start the console and push the step that stops it to `undo`; return None if the node gets no console.

    Raise ConfigError if the settings are refused or the given address cannot be used. A default port that is taken
    costs only the console.
    """
    settings = services.settings
    broker = settings.broker
    if not broker.console_listen or not settings.roles.is_broker:
        return None
    # Import late: aiohttp takes long to import, and a node without console and metrics does not need it.
    from gateway.console.server import DEFAULT_LISTEN, STOP_TIMEOUT_S, Console, Parts

    secured = {
        listener.name: listener_security(listener, broker)
        for listener in settings.listeners
        if not listener.is_controller
    }
    plain = frozenset(name for name, each in secured.items() if each.sasl is None and each.tls is None)
    oauth = next(
        (each.sasl.oauthbearer for each in secured.values() if each.sasl is not None and each.sasl.oauthbearer), None
    )
    console = Console(Parts(Kafka(dispatch, services, plain), database, users, figures, oauth), broker)
    undo("console", 2 * STOP_TIMEOUT_S, console.stop)
    try:
        await console.start()
    except OSError as error:
        reason = error.strerror or str(error)
        if broker.console_listen != DEFAULT_LISTEN:
            raise ConfigError("console.listen", broker.console_listen, f"cannot be used: {reason}") from error
        logger.warning(
            "no console: its port is taken; give another one by --set console.listen=HOST:PORT, or none by "
            "--set console.listen=",
            address=DEFAULT_LISTEN,
            error=reason,
        )
        return None
    return console
