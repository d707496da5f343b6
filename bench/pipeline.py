"""`python -m bench.pipeline`: rates of archive, verify and replay on local[2], a gateway on the same two cores.

    python -m bench.pipeline                                          a gateway of its own
    python -m bench.pipeline --peer localhost:19092 --rounds 2        and another broker beside it, in turns

A rate is of the batches behind the first one, in which the JVM compiles; verify's is of its whole comparison. Clients,
broker, Postgres and Spark share the machine. With --peer the last line is the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import Producer

from bench.__main__ import running_gateway
from bench.librdkafka import create_topic

PARTITIONS, RECORD_BYTES, BATCH = 4, 200, 500_000
TARGETS = {"archive": 150_000, "verify": 300_000, "replay": 80_000}
JOB_SECONDS = 1800


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline")
    parser.add_argument("--records", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", metavar="HOST:PORT", help="another broker, such as Apache Kafka, to compare with")
    given = parser.parse_args(arguments)
    found: dict[str, dict[str, list[float]]] = {}
    with running_gateway() as gateway, tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        brokers = {"sluice": gateway.bootstrap} | ({"peer": given.peer} if given.peer else {})
        topic = f"bench-{time.time_ns()}"
        for bootstrap in brokers.values():
            fill(bootstrap, topic, given.records)
        for number in range(given.rounds):
            for name, bootstrap in brokers.items():
                rates = measure(bootstrap, topic, Path(folder) / f"{name}-{number}")
                for job, rate in rates.items():
                    found.setdefault(job, {}).setdefault(name, []).append(rate)
                    print(f"{name} {job}: {rate:,.0f} records/s", flush=True)
    for job, of in found.items():
        medians = {name: statistics.median(rates) for name, rates in of.items()}
        words = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in medians.items())
        ratio = f", ratio {medians['sluice'] / medians['peer']:.2f}" if "peer" in medians else ""
        print(f"{job}: {words}{ratio}; target {TARGETS[job]:,}/s", flush=True)
    return 0


def fill(bootstrap: str, topic: str, records: int) -> None:
    create_topic(bootstrap, topic, PARTITIONS)
    # Text that compresses as ordinary values do, of which a thousand differ.
    values = [os.urandom(RECORD_BYTES // 2).hex().encode() for _ in range(1000)]
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 1_000_000})
    for index in range(records):
        while True:
            try:
                producer.produce(topic, values[index % 1000], b"%d" % (index % 100_000), index % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(300):
        raise RuntimeError(f"{bootstrap} did not take all records")


def measure(bootstrap: str, topic: str, folder: Path) -> dict[str, float]:
    out = str(folder / "table")
    to = ("--bootstrap", bootstrap)
    limit = ("--max-batch-records", str(BATCH))
    archived = run("archive", *to, "--topics", topic, "--out", out, "--once", *limit)
    proved = run("verify", *to, "--archive", out)
    mapped = f"{topic}={topic}-{folder.name}"
    replayed = run("replay", *to, "--archive", out, "--topic-map", mapped, "--create-topics", *limit)
    compared = next(line for line in proved if line.get("event") == "compared")
    return {"archive": warm(archived), "verify": float(compared["rate"]), "replay": warm(replayed)}


def warm(lines: Sequence[dict[str, float]]) -> float:
    """Rows per second between the first commit and the last."""
    done = [line for line in lines if line.get("event") == "committed"]
    return sum(line["rows"] for line in done[1:]) / (done[-1]["seconds"] - done[0]["seconds"])


def run(job: str, *given: str) -> list[dict[str, float]]:
    """The lines of a job. CalledProcessError if it fails."""
    command = [sys.executable, "-m", "pipeline.cli", job, "--json", "--master", "local[2]", *given]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=JOB_SECONDS)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    sys.exit(main())
