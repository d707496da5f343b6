"""The pytest plugin, in a separate pytest that runs with the installed wheel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.wheels import installed, run, wheel

__all__ = ["installed", "wheel"]

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 120

TESTS = """
import os
import pytest
import storage
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

@pytest.fixture(scope="session")
def kafka_settings():
    return {"num.partitions": "5"}

def topics(bootstrap):
    return AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=60).topics

@pytest.mark.parametrize("number", range(4))
def test_each_test_begins_without_the_topics_of_others(kafka, number, worker_id, tmp_path_factory):
    assert not [name for name in topics(kafka.bootstrap) if name.startswith("left")]
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(f"left-{number}", "a")
    assert producer.flush(60) == 0
    assert len(topics(kafka.bootstrap)[f"left-{number}"].partitions) == 5
    shared = tmp_path_factory.getbasetemp().parent
    (shared / f"{worker_id}.address").write_text(kafka.bootstrap)
    kafka.fail_next("Produce", times=100)

def test_the_topic_is_new_and_named_after_the_test(kafka_topic, kafka_bootstrap):
    assert kafka_topic.startswith("test_the_topic_is_new_and_named_after_the_test")
    assert len(topics(kafka_bootstrap)[kafka_topic].partitions) == 1
    producer, errors = Producer({"bootstrap.servers": kafka_bootstrap}), []
    producer.produce(kafka_topic, "a", on_delivery=lambda error, _: errors.append(error))
    producer.flush(60)
    assert errors == [None], "a fault of an earlier test is still there"

def test_the_topic_outlives_the_reset_in_any_order_of_the_fixtures(kafka_topic, kafka):
    assert kafka_topic in topics(kafka.bootstrap)

def test_the_users_modules_are_the_users():
    assert storage.OWNER == "the user"
"""


def test_two_workers_have_a_server_each_and_each_test_a_fresh_one(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(TESTS)
    command = [installed / "bin" / "python", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = run([*command, "--basetemp", tmp_path / "base", "--rootdir", tmp_path, tmp_path / "test_users.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
    addresses = {path.read_text() for path in (tmp_path / "base").glob("*.address")}
    assert len(addresses) == 2


LOADED = """
import sys

def test_nothing_of_the_broker_is_imported():
    assert "sluice.testing._plugin" in sys.modules
    assert not {"gateway", "storage", "asyncpg", "uvloop"} & set(sys.modules)
"""


def test_the_plugin_imports_nothing_of_the_broker(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(LOADED)
    command = [installed / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    done = run([*command, tmp_path / "test_users.py"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fixtures_are_listed_with_what_they_give(installed: Path, tmp_path: Path) -> None:
    done = run([installed / "bin" / "python", "-m", "pytest", "--fixtures", "--rootdir", tmp_path, tmp_path])
    for name in ("kafka", "kafka_bootstrap", "kafka_topic", "kafka_server", "kafka_settings"):
        assert f"\n{name}" in done.stdout


def test_the_examples_of_the_page_are_green(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/testing.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        (tmp_path / f"test_block_{number}.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
