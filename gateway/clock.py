"""What this node's wall clock shows, for times that are told or outlive the process. Leases go by Postgres' clock."""

from __future__ import annotations

import time


def wall_ms() -> int:
    return time.time_ns() // 1_000_000
