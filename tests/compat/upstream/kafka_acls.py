"""A replacement for the parts of Kafka's kafka-acls.sh that librdkafka's tests use: allow or deny principals an
operation on a topic. The one idea: like `kafka_topics.py`, it accepts the arguments of a script that does not exist
here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

REQUEST_SECONDS = 30.0


def install(folder: Path) -> None:
    """Write the script into a folder that replaces a Kafka distribution."""
    script = folder / "bin" / "kafka-acls.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {__spec__.name} "$@"\n')
    script.chmod(0o755)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-server", required=True)
    parser.add_argument("--add", action="store_true", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--operation", required=True)
    principal = parser.add_mutually_exclusive_group(required=True)
    for permission in ("allow", "deny"):
        principal.add_argument(f"--{permission}-principal")
        parser.add_argument(f"--{permission}-host", default="*")
    options = parser.parse_args(arguments)
    allows = options.allow_principal is not None
    client: Any = AdminClient({"bootstrap.servers": options.bootstrap_server})
    binding = AclBinding(
        ResourceType.TOPIC,
        options.topic,
        ResourcePatternType.LITERAL,
        options.allow_principal if allows else options.deny_principal,
        options.allow_host if allows else options.deny_host,
        AclOperation[options.operation.upper()],
        AclPermissionType.ALLOW if allows else AclPermissionType.DENY,
    )
    for future in client.create_acls([binding], request_timeout=REQUEST_SECONDS).values():
        future.result(REQUEST_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
