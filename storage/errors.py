"""The exceptions of storage. asyncpg's exceptions never leave this room; a caller sees one of these six.

Refusals that Postgres decides about one element of a call are values (`storage.types.Refusal`), not exceptions.
"""


class StorageError(Exception):
    """Postgres refused a statement. The cause is a bug of ours or an unexpected database."""


class StorageUnavailable(StorageError):  # noqa: N818 - a state, not a mistake
    """Postgres cannot be reached, took too long, or is short of a resource. Transient.

    It is unknown whether a write that ends this way took effect: report it neither as done nor as undone.
    """


class RecordsUnreadable(StorageError):  # noqa: N818 - a state, not a mistake
    """Records are in the log, but their bytes are missing or wrong, or their store cannot be reached."""


class StorageConflict(StorageError):  # noqa: N818 - a state, not a mistake
    """Fenced: a lease, registration or revision that the write relied on has been superseded. Nothing was written."""


class TransactionTooLarge(StorageError):  # noqa: N818 - a state, not a mistake
    """The transaction may not enlist this many partitions and groups. Nothing was written."""


class PoolerError(StorageError):
    """A connection pooler in front of Postgres does not keep the sessions of its clients."""
