"""Topics for tests: a fresh name each time."""

from __future__ import annotations

import uuid

from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]


def create_topic(bootstrap: str, partitions: int, name: str | None = None) -> str:
    """Create a topic, wait until it exists, and return its name."""
    name = name or f"t-{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)
    return name
