"""What storage raises. The one idea: nothing of asyncpg leaves this room; a caller sees one of these four.

Refusals that Postgres decides about one element of a call are values (`storage.types.Refusal`), not exceptions.
"""


class StorageError(Exception):
    """Postgres refused a statement: a bug of ours or a database that is not what it should be."""


class StorageUnavailable(StorageError):  # noqa: N818 - a state, not a mistake
    """Postgres cannot be reached, took too long, or is short of a resource. Transient.

    Whether a write that ends so took effect is unknown: never report it as done, never as undone.
    """


class RecordsUnreadable(StorageError):  # noqa: N818 - a state, not a mistake
    """Records are in the log, but their bytes are missing or wrong, or their store is away."""


class StorageConflict(StorageError):  # noqa: N818 - a state, not a mistake
    """Fenced: a lease, registration or revision that the write relied on has been superseded. Nothing was written."""
