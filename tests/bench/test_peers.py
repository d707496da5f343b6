"""The report of the comparison with other servers. If a target is missed, the report also shows commits without other
work.
"""

from __future__ import annotations

import pytest

from bench import commit_floor
from bench.peers import PEERS, TARGETS, Target, floors, misses, report
from bench.workloads import WORKLOADS


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


def test_missed_target_shows_the_commits_alone_and_a_met_one_does_not() -> None:
    found = {
        ("produce-java", "MiB/s"): {"Sluice": [40.0], "Kafka": [60.0], "Kafka synced": [10.0]},
        ("one-in-flight", "p50 ms"): {"Sluice": [0.3], "Kafka": [0.1], "Kafka synced": [0.4]},
        ("topics", "seconds"): {"Sluice": [3.0], "Kafka": [1.0], "Kafka synced": [1.0]},
    }
    lines = report(found, PEERS, {("produce-java", "MiB/s"): 51.0, ("one-in-flight", "p50 ms"): 0.2}).splitlines()[2:]
    assert [line.split(" | ")[-2:] for line in lines] == [
        ["≥ 1.0 × Kafka: **missed**, ≥ 4.0 × Kafka synced: met", "51.00 |"],
        ["≤ 1.0 × Kafka synced: met", " |"],
        ["", " |"],
    ]


def test_cost_above_its_bound_misses_and_one_at_its_bound_does_not() -> None:
    row = ("paced", "server CPU ms/record")
    assert not misses({row: {"Sluice": [0.8], "Kafka synced": [1.0]}})
    assert misses({row: {"Sluice": [0.9], "Kafka synced": [1.0]}}) == {row: [Target("Kafka synced", 0.8, at_most=True)]}


def test_each_target_and_each_program_of_commits_belongs_to_a_workload() -> None:
    assert {name for name, _ in TARGETS} | set(commit_floor.FLOORS) <= set(WORKLOADS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("one-in-flight", {"p50 ms", "p99 ms"}),
        ("paced", {"server CPU ms/record", "p50 ms", "p99 ms"}),
        ("produce-java", {"MiB/s", "server CPU ms/MiB"}),
    ],
)
def test_commits_alone_have_the_figures_of_their_workload(name: str, figures: set[str]) -> None:
    found = floors([name, "consume"], seconds=1, warm_up_s=0.2)
    assert {figure for _, figure in found} == figures
    assert {workload for workload, _ in found} == {name}
    assert all(value > 0 for value in found.values())


def test_median_of_zero_gives_no_ratio() -> None:
    found = {("paced-java", "p50 ms"): {"Sluice": [1.0], "Kafka": [0.0], "Kafka synced": [1.0]}}
    assert report(found, PEERS).splitlines()[2] == "| paced-java | p50 ms | 1.00 | 0.00 | 1.00 | – | 1.00 |"
