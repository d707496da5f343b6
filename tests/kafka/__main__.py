"""`python -m tests.kafka`: assembles Apache Kafka and runs one node until Ctrl-C."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from tests.kafka.process import KafkaProcess, assemble


def main() -> None:
    version = assemble()
    with tempfile.TemporaryDirectory(prefix="kafka-") as directory:
        kafka = KafkaProcess(Path(directory), settings={})
        kafka.start()
        try:
            print(f"Apache Kafka {version} serves at {kafka.bootstrap}; Ctrl-C ends it", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
        finally:
            kafka.close()


if __name__ == "__main__":
    main()
