"""Describe where a report was measured, in one line: the machine, the commit and the client."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import confluent_kafka
import psutil

from storage.postgres_programs import MAJOR_VERSION


def measured_by(command: str) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"Measured by `{command}` on {datetime.date.today().isoformat()} at commit {commit or 'unknown'}: "
        f"{os.cpu_count()} cores ({processor}), {psutil.virtual_memory().total / 1e9:.0f} GB, Python "
        f"{platform.python_version()}, embedded Postgres {MAJOR_VERSION}, "
        f"librdkafka {confluent_kafka.libversion()[0]} on the same machine."
    )
