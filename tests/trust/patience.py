"""Times and settings that all clients of a run share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CALL_S = 10.0
FINISH_S = 180.0
"""How long a workload may take to finish after the last fault has ended."""
LEAVE_S = 120.0
"""How long a consumer may take to leave its group, because its coordinator may be gone in the meantime."""
DELIVERY_S = 900.0
"""How long a producer repeats a record: longer than any outage. After a record has timed out, librdkafka numbers its
batches anew. It then sends batches again that may already be in the log.
"""
PATIENT: Mapping[str, Any] = {
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "socket.timeout.ms": 6_000,
    "log_level": 0,
}
"""Settings of each librdkafka client."""


class WorkloadError(Exception):
    """A workload could not continue or finish, although all faults had ended."""


class ClientError(Exception):
    """The cluster or Postgres refused a request for good, which neither a fault nor a busy machine explains."""
