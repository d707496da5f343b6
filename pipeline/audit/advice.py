"""Advice that follows from an audit's figures. Each sentence names an observation and an action. The module is a pure
function.
"""

from __future__ import annotations

from typing import Any

from pipeline.analyze.findings import counted, seconds

UNEVEN = 1.5
"""A partition is reported if its share is this many times the even share."""
HOT_KEY = 0.1
MUCH_SMALLER = 2.0


def advice(told: dict[str, Any]) -> list[str]:
    """Return at least one sentence, even if there is nothing to do."""
    return [
        *_balance(told["partitions"], told["keys"]),
        *_keys(told["keys"], told["partitioner"]),
        *_sizes(told["size_figures"]),
        *_times(told["lateness"]),
        *_compression(told["compression"]),
    ] or ["records are spread evenly, of even size and in order of time: there is nothing to do."]


def _balance(partitions: list[dict[str, Any]], keys: dict[str, Any]) -> list[str]:
    heaviest = max(partitions, key=lambda partition: partition["share"])
    even = 1 / (max(partition["partition"] for partition in partitions) + 1)
    if len(partitions) < 2 or heaviest["share"] < UNEVEN * even:
        return []
    hot = keys["hottest_records"] / max(1, keys["records"])
    cause = (
        f"its hottest key alone has {hot:.0%} of the topic: no partitioner can spread that, split the key"
        if hot >= HOT_KEY
        else "no single key explains it: more partitions, or another partitioner, will spread it"
    )
    return [
        f"partition {heaviest['partition']} has {heaviest['share']:.0%} of the records where an even share is "
        f"{even:.0%}; {cause}."
    ]


def _keys(keys: dict[str, Any], partitioner: str | None) -> list[str]:
    told: list[str] = []
    hot = keys["hottest_records"] / max(1, keys["records"])
    if hot >= HOT_KEY:
        told.append(
            f"one key ({keys['hottest_key']} in hexadecimal) has {hot:.0%} of the records: the owner of its "
            "partition does most of the work."
        )
    if keys["keys_in_several_partitions"]:
        told.append(
            f"{counted(keys['keys_in_several_partitions'], 'key')} of {keys['keys']:,} lie in more than one "
            "partition, so their order is lost: "
            "partitions were added, or producers use different partitioners."
        )
    if partitioner == "mixed":
        told.append(
            "Java's murmur2 placed some keys, and librdkafka's CRC32 others: set partitioner=murmur2_random in "
            "librdkafka."
        )
    unkeyed = keys["records"] - keys["keyed_records"]
    if unkeyed and keys["keyed_records"]:
        told.append(
            f"{counted(unkeyed, 'record')} of {keys['records']:,} have no key, the others do: check the producers."
        )
    return told


def _sizes(figures: dict[str, Any]) -> list[str]:
    median, high = figures["points"]
    told: list[str] = []
    if figures["largest"] >= 1_000_000:
        told.append(
            f"the largest value has {figures['largest']:,} bytes: keep such payloads elsewhere and send a reference."
        )
    elif high >= 50 * max(1, median) and high >= 10_000:
        told.append(
            f"1 in 100 values has {high:,} bytes or more, the median {median:,}: the few large ones delay the "
            "rest of their partition."
        )
    if figures["header_bytes"] > max(1, median):
        told.append(f"headers weigh {figures['header_bytes']:,.0f} bytes a record, more than its value does.")
    return told


def _times(lateness: dict[str, Any]) -> list[str]:
    told: list[str] = []
    timed = lateness["timed"] or 0
    if lateness["without_time"]:
        told.append(
            f"{counted(lateness['without_time'], 'record')} have no timestamp: retention by time counts from "
            "when they were appended."
        )
    if timed and lateness["late"] / timed >= 0.01:
        told.append(
            f"{lateness['late'] / timed:.1%} of the records are more than a second older than one before them, "
            "1 in 100 by "
            f"{seconds(lateness['late_p99_ms'])}, at most {seconds(lateness['late_max_ms'])}: give windows "
            "that much grace."
        )
    if (lateness["partition_skew_ms"] or 0) >= 3_600_000:
        told.append(
            f"the newest records of its partitions are {seconds(lateness['partition_skew_ms'])} apart: some "
            "partition has fallen silent."
        )
    return told


def _compression(compression: dict[str, dict[str, float]]) -> list[str]:
    if not compression:
        return []
    best = max(compression, key=lambda codec: compression[codec]["ratio"])
    fast = max(compression, key=lambda codec: compression[codec]["mb_per_s"])
    if compression[best]["ratio"] < MUCH_SMALLER:
        if compression[best]["ratio"] < 1.1:
            return [
                "values do not compress (encrypted, or compressed already): set compression.type=none in producers."
            ]
        return []
    return [
        f"values shrink {compression[best]['ratio']:.1f} times with {best} and "
        f"{compression[fast]['ratio']:.1f} times with {fast}, "
        f"the fastest here ({compression[fast]['mb_per_s']:,.0f} MB/s): producers that do not compress should."
    ]
