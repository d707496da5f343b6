"""`python -m bench.unvalidated serve ...`: the gateway as `sluice` runs it, but without checks of the contents of
batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.cli import main
from gateway.log import batch_validation
from gateway.log.validator import BatchValidator, Unchecked, Verdict


def judge_heads(_: BatchValidator, batches: Sequence[Unchecked], now_ms: int) -> list[Verdict]:
    return [
        batch_validation.validate(
            batch.records,
            version=batch.version,
            config=batch.config,
            now_ms=now_ms,
            max_decompressed_bytes=0,
        )
        for batch in batches
    ]


if __name__ == "__main__":
    batch_validation._check_records = lambda _records, head, *_: head  # type: ignore[reportPrivateUsage]
    BatchValidator.judge_at_once = judge_heads  # type: ignore[method-assign]
    sys.exit(main())
