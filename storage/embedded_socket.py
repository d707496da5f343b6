"""The socket of the Postgres that a node runs in its data directory, and whether a server runs behind it.

The one idea: a command that only reads asks here, so it loads nothing of what starts and ends a server.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from urllib.parse import quote

from storage.errors import StorageError

USER = "sluice"
DATABASE = "postgres"
"""Name of the database that initdb creates."""
PORT = 5432
SOCKET_NAME = f".s.PGSQL.{PORT}"
LOCK_NAME = "sluice.lock"
MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) − 1 on Linux."""


def running_url(data_dir: Path) -> str | None:
    """Return the URL of the server that another process runs in the directory; None if no server runs.

    Raise StorageError if the directory cannot be read.
    """
    data_dir = data_dir.expanduser().absolute()
    try:
        lock_fd = os.open(data_dir / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot look into {data_dir}: {error.strerror}") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return socket_url(socket_directory(data_dir))
    finally:
        os.close(lock_fd)
    return None


def socket_directory(data_dir: Path) -> Path:
    """Return the directory of the socket: below the data directory, or a private one if that path is too long."""
    directory = data_dir / "socket"
    if len(os.fsencode(directory / SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
        directory = Path(tempfile.gettempdir()) / f"sluice-{os.geteuid()}-{digest}"
    return directory


def socket_url(directory: Path) -> str:
    host = quote(str(directory), safe="")
    return f"postgresql://{USER}@/{DATABASE}?host={host}&port={PORT}&sslmode=disable"
