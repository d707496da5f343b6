"""The report of the comparison with other servers."""

from __future__ import annotations

from bench.peers import PEERS, report


def test_several_rounds_show_median_and_spread_and_ratios_of_medians() -> None:
    found = {
        ("paced-java", "p99 ms"): {
            "Sluice": [9.0, 2.0, 4.0],
            "Kafka": [8.0, 6.0, 80.0],
            "Kafka synced": [16.0, 16.0, 1.0],
        }
    }
    assert report(found, PEERS).splitlines()[2] == (
        "| paced-java | p99 ms | 4.00 (2.00–9.00) | 8.00 (6.00–80.00) | 16.00 (1.00–16.00) | 0.50 | 0.25 |"
    )


def test_one_round_shows_its_value_alone() -> None:
    found = {("end-to-end", "p50 ms"): {"Sluice": [1.5], "Kafka": [1.0], "Kafka synced": [3.0]}}
    assert report(found, PEERS).splitlines()[2] == "| end-to-end | p50 ms | 1.50 | 1.00 | 3.00 | 1.50 | 0.50 |"
