"""A replacement for the parts of Kafka's kafka-topics.sh that librdkafka's tests use: create a topic, delete it, add
partitions.

The one idea: the tests start this script in a Kafka distribution, which does not exist here. This program accepts the
script's arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

REQUEST_SECONDS = 30.0


def install(folder: Path) -> Path:
    """Create a folder that replaces a Kafka distribution."""
    script = folder / "bin" / "kafka-topics.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {__spec__.name} "$@"\n')
    script.chmod(0o755)
    return folder


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-server", required=True)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--create", action="store_true")
    action.add_argument("--delete", action="store_true")
    action.add_argument("--alter", action="store_true")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, default=-1)
    parser.add_argument("--replication-factor", type=int, default=-1)
    parser.add_argument("--config", action="append", default=[])
    options = parser.parse_args(arguments)
    client: Any = AdminClient({"bootstrap.servers": options.bootstrap_server})
    if options.create:
        configs = dict(setting.split("=", 1) for setting in options.config)
        topic = NewTopic(options.topic, options.partitions, options.replication_factor, config=configs)
        futures = client.create_topics([topic], request_timeout=REQUEST_SECONDS)
    elif options.delete:
        futures = client.delete_topics([options.topic], request_timeout=REQUEST_SECONDS)
    else:
        partitions = NewPartitions(options.topic, options.partitions)
        futures = client.create_partitions([partitions], request_timeout=REQUEST_SECONDS)
    for future in futures.values():
        future.result(REQUEST_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
