"""Kafka's Java tools and client, which tests of other projects start. They are fetched once, if Java is installed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

POM = Path(__file__).parent / "kafka_tools" / "pom.xml"


def fetch(target: Path) -> bool:
    """Fetch the jars of these tools into `target`, once per version. If Java is not installed, fetch nothing and return
    False.
    """
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
