"""Results of other programs, as the workloads read them."""

from __future__ import annotations

import pytest

from bench.workloads import JavaResult, java_result

PRINTED = """\
4998 records sent, 999.4 records/sec (0.10 MB/sec), 1.9 ms avg latency, 310.0 ms max latency.
10000 records sent, 1000.1 records/sec (0.10 MB/sec), 1.52 ms avg latency, 310.00 ms max latency, \
1 ms 50th, 3 ms 95th, 17 ms 99th, 44 ms 99.9th.
"""


def test_totals_of_javas_producer_are_those_printed_last() -> None:
    assert java_result(PRINTED) == JavaResult(1000.1, 1, 17)


def test_output_of_javas_producer_without_totals_is_refused() -> None:
    with pytest.raises(RuntimeError, match="printed no totals"):
        java_result(PRINTED.partition("\n")[0])
