class CorruptRecordException(Exception): ...  # noqa: N818
