"""Kafka's Java tools and client as other people's tests start them: fetched once, where there is a Java."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

POM = Path(__file__).parent / "kafka_tools" / "pom.xml"


def fetch(target: Path) -> bool:
    """Their jars into `target`, once per description; False, and none of them, where there is no Java."""
    stamp = target.with_suffix(".stamp")
    wanted = hashlib.sha256(POM.read_bytes()).hexdigest()
    if shutil.which("java") is None or shutil.which("mvn") is None:
        shutil.rmtree(target, ignore_errors=True)
        return False
    if not (target.exists() and stamp.exists() and stamp.read_text() == wanted):
        shutil.rmtree(target, ignore_errors=True)
        command = ["mvn", "--quiet", "--batch-mode", "--file", str(POM), "dependency:copy-dependencies"]
        subprocess.run([*command, f"-DoutputDirectory={target}"], check=True)
        stamp.write_text(wanted)
    return True
