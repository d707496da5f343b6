from collections.abc import Iterator, Sequence
from pathlib import Path

from pyarrow import RecordBatch, Schema

class ReadOptions:
    def __init__(self, *, column_names: Sequence[str] = ..., block_size: int = ...) -> None: ...

class ParseOptions:
    def __init__(self, *, newlines_in_values: bool = ...) -> None: ...

class ConvertOptions:
    def __init__(
        self,
        *,
        column_types: Schema = ...,
        null_values: Sequence[str] = ...,
        true_values: Sequence[str] = ...,
        false_values: Sequence[str] = ...,
        strings_can_be_null: bool = ...,
        quoted_strings_can_be_null: bool = ...,
    ) -> None: ...

class CSVStreamingReader:
    def __iter__(self) -> Iterator[RecordBatch]: ...

def open_csv(
    input_file: Path,
    read_options: ReadOptions | None = None,
    parse_options: ParseOptions | None = None,
    convert_options: ConvertOptions | None = None,
) -> CSVStreamingReader: ...
