"""Keep a node's knowledge of its database's history from one run to the next, in files beside the log's bytes.

The one idea: a database whose files were put back while no node ran looks like itself. So the evidence is kept where it
is not put back too: how long the write-ahead log had been, which transactions were acknowledged last, and the catalog's
revision. Each node has its own file, so nodes share nothing but the directory. A file about another database or an
earlier history proves nothing.

An unreadable file is ignored, because nothing depends on this evidence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog

from storage.errors import StorageError
from storage.guard import Known
from storage.private_files import write_file

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

_NAME = "sluice-history-{}.json"


@dataclass(frozen=True, slots=True)
class Remembered:
    """The known state of a history, and the database to which it belongs."""

    identity: str
    known: Known


def write(directory: Path, node_id: int, remembered: Remembered) -> None:
    """Replace what this node remembered before. Blocks; raises StorageError."""
    known = remembered.known
    path = directory / _NAME.format(node_id)
    text = json.dumps(
        {
            "identity": remembered.identity,
            "history": known.history,
            "flushed_lsn": known.flushed_lsn,
            "transactions": list(known.transactions),
            "catalog_revision": known.catalog_revision,
        }
    )
    try:
        write_file(path, text.encode())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def read(directory: Path) -> list[Remembered]:
    """Return what any node has remembered. Blocks."""
    found: list[Remembered] = []
    for path in sorted(directory.glob(_NAME.format("*"))):
        try:
            found.append(_parsed(json.loads(path.read_text("utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("file of a node's last transactions cannot be read", path=str(path), error=str(error))
    return found


def _parsed(value: Any) -> Remembered:
    transactions = [int(each) for each in cast("list[Any]", value["transactions"])]
    # Earlier releases did not write the revision.
    revision = int(value.get("catalog_revision", 0))
    known = Known(int(value["history"]), int(value["flushed_lsn"]), tuple(transactions), revision)
    return Remembered(str(value["identity"]), known)
