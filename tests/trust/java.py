"""Java's clients (Clients.java)."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.gateway_process import ROOT
from tests.kafka.process import LIBRARIES, LOGGING, assemble
from tests.trust.foreign import ForeignProcess

SOURCE = Path(__file__).with_name("Clients.java")
CLASSES = ROOT / ".compat" / "trust"
COMPILE_S = 300.0
JVM = ("-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Dlog4j2.configurationFile={LOGGING}")


def missing() -> str | None:
    """Return the reason why Java's clients cannot run here, if there is one."""
    absent = [program for program in ("java", "javac") if shutil.which(program) is None]
    if not any(LIBRARIES.glob("kafka-clients-*.jar")) and shutil.which("mvn") is None:
        absent.append("mvn")
    return f"{' and '.join(absent)} not installed" if absent else None


def build() -> Path:
    """Compile the clients if their source has changed, and return the directory of the classes."""
    assemble()
    built = CLASSES / hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    if not (built / "complete").exists():
        command = ["javac", "-cp", f"{LIBRARIES}/*", "-d", str(built), str(SOURCE)]
        subprocess.run(command, check=True, timeout=COMPILE_S, stdin=subprocess.DEVNULL)
        (built / "complete").touch()
    return built


class Java(ForeignProcess):
    def __init__(self, bootstrap: str) -> None:
        super().__init__(["java", *JVM, "-cp", f"{build()}:{LIBRARIES}/*", "Clients", bootstrap])
