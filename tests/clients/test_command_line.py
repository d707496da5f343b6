"""kcat and kafka-python's admin command line, used as a person would."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid

import pytest

from tests.gateway_process import GatewayProcess


def run(*command: str, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture
def kcat() -> str:
    path = shutil.which("kcat")
    if path is None:
        pytest.skip("kcat is not installed")
    return path


def test_kcat_produces_consumes_and_lists(gateway: GatewayProcess, kcat: str) -> None:
    topic = f"kcat-{uuid.uuid4().hex[:8]}"
    run(kcat, "-b", gateway.bootstrap, "-t", topic, "-P", "-K:", stdin="a:one\nb:two\n")
    out = run(kcat, "-b", gateway.bootstrap, "-t", topic, "-C", "-e", "-q", "-f", "%o %k %s\n")
    assert out == "0 a one\n1 b two\n"
    assert f'topic "{topic}" with 1 partitions' in run(kcat, "-b", gateway.bootstrap, "-L", "-t", topic)
    assert run(kcat, "-b", gateway.bootstrap, "-Q", "-t", f"{topic}:0:-1").strip() == f"{topic} [0] offset 2"


def test_kcat_consumes_in_a_group_and_resumes(gateway: GatewayProcess, kcat: str) -> None:
    topic, group = f"kcat-{uuid.uuid4().hex[:8]}", f"g-{uuid.uuid4().hex[:8]}"
    for text in ("one\n", "two\n"):
        run(kcat, "-b", gateway.bootstrap, "-t", topic, "-P", stdin=text)
        read = run(kcat, "-b", gateway.bootstrap, "-X", "auto.offset.reset=earliest", "-q", "-e", "-G", group, topic)
        assert read == text


def test_kafka_pythons_command_line_administers_topics_and_groups(gateway: GatewayProcess) -> None:
    topic = f"cli-{uuid.uuid4().hex[:8]}"
    admin = (sys.executable, "-m", "kafka.admin", "-b", gateway.bootstrap)
    run(*admin, "topics", "create", "--topic", topic, "--num-partitions", "3")
    assert topic in run(*admin, "topics", "list")
    assert topic in run(*admin, "topics", "describe", "--topic", topic)
    assert gateway.bootstrap.split(":")[1] in run(*admin, "cluster", "describe")
    run(*admin, "topics", "delete", "--topic", topic)
    assert topic not in run(*admin, "topics", "list")
