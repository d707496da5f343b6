"""The security quickstart: its commands run as a person would copy them, except that the ports are replaced."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from confluent_kafka.admin import AdminClient

from tests.gateway_process import ROOT, clean_environment, free_ports

PATIENCE_S = 150


def block(heading: str) -> str:
    """Return the first shell block behind a heading of docs/security.md."""
    text = (ROOT / "docs" / "security.md").read_text()
    found = re.search(rf"^## {heading}$.*?^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_security_quickstart_works_by_copy_and_paste(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    script = block("TLS and passwords")
    for port, free in zip(("9092", "9094"), free_ports(2), strict=True):
        assert port in script
        script = script.replace(port, str(free))
    inherited = clean_environment()
    environment = {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLUICE_METRICS_LISTEN": "off",
    }
    asked = f"sluice topics list -b localhost:{free} --command-config admin.properties"
    # The block gets a session of its own, so the test can end exactly the processes that the block leaves behind.
    shell = subprocess.Popen(
        ["bash", "-e", "-c", f"{script}\n{asked}"],
        cwd=tmp_path,
        env=environment,
        stdout=(tmp_path / "out").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = shell.wait(PATIENCE_S)
        said = (tmp_path / "out").read_text()
        assert code == 0, said
        assert said.rstrip().splitlines()[-1].split()[0] == "orders", said
        for user, password, mechanism in (("bob", "his password", "SCRAM-SHA-512"), ("alice", "her password", "PLAIN")):
            admin = AdminClient(
                {
                    "bootstrap.servers": f"localhost:{free}",
                    "security.protocol": "SASL_SSL",
                    "ssl.ca.location": str(tmp_path / "ca.pem"),
                    "sasl.mechanism": mechanism,
                    "sasl.username": user,
                    "sasl.password": password,
                }
            )
            assert "orders" in admin.list_topics(timeout=30).topics
        assert re.search(
            rf"Listener OUTSIDE:\n  kcat -b localhost:{free} -L -X security.protocol=SASL_SSL "
            "-X sasl.mechanism=SCRAM-SHA-512 -X sasl.username=USER -X sasl.password=PASSWORD "
            "-X ssl.ca.location=CA.pem\n",
            said,
        ), said
    finally:
        end(shell.pid)


def end(group: int) -> None:
    """End all processes of a process group, and wait until they have ended."""
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while True:
            os.killpg(group, 0)
            assert time.monotonic() < deadline
            time.sleep(0.05)
