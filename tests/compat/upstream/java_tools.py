"""Kafka's Java tools and client as tests of other projects start them: fetched once, if there is a Java."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

POM = Path(__file__).parent / "kafka_tools" / "pom.xml"


def fetch(target: Path) -> bool:
    """Fetch the jars of these tools into `target`, once per description. Return False, and fetch nothing, if there is
    no Java."""
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
