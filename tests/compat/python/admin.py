"""Admin scenarios: topics, configs, groups."""

from __future__ import annotations

from collections.abc import Callable

from tests.compat.python.client import Client, MemberOptions, Record, UnsupportedError, wait_until
from tests.compat.python.scenario import Run, scenario


@scenario("admin.topics")
def topics(run: Run) -> None:
    client = _admin_of(run)
    topic = run.topic(2)
    assert client.partitions(topic) == 2
    client.add_partitions(topic, 5)
    wait_until(lambda: client.partitions(topic) == 5, "five partitions")
    _refused(lambda: client.create_topic(topic, 1), "already", "exist")
    client.delete_topic(topic)
    wait_until(lambda: client.partitions(topic) is None, "the topic is gone")


@scenario("admin.configs")
def configs(run: Run) -> None:
    client = _admin_of(run)
    topic = run.topic(1)
    assert client.topic_config(topic, "cleanup.policy") == "delete"
    client.set_topic_config(topic, "retention.ms", "3600000")
    wait_until(lambda: client.topic_config(topic, "retention.ms") == "3600000", "retention.ms is altered")
    assert client.topic_config(topic, "cleanup.policy") == "delete"


@scenario("admin.groups")
def groups(run: Run) -> None:
    client = _admin_of(run)
    topic = run.topic(1)
    journal, view = run.journal(topic, 1)
    with run.closing(client.producer()) as producer:
        producer.send(topic, [(0, Record(b"x"))])
    journal.produced(topic, 0, 0)
    group = run.group()
    member = run.start(MemberOptions("c1", group, client.assignors[0], (topic,)))
    view.wait_caught_up()
    assert group in client.groups()
    state, members = client.group_state(group)
    assert (state.lower(), members) == ("stable", 1), f"{state} with {members} members"
    if client.deletes_groups:
        _refused(lambda: client.delete_group(group), "empty")
    member.stop()
    wait_until(lambda: client.group_state(group)[1] == 0, "it is empty")
    assert client.committed(group, topic, 0) == 1
    client.commit(group, topic, {0: 0})
    assert client.committed(group, topic, 0) == 0
    if not client.deletes_groups:
        run.detail = "without deletion, which its admin client does not have"
        return
    client.delete_group(group)
    wait_until(lambda: group not in client.groups(), "it is deleted")
    assert client.committed(group, topic, 0) is None


def _admin_of(run: Run) -> Client:
    if run.client.no_admin:
        raise UnsupportedError(run.client.no_admin)
    return run.client


def _refused(attempt: Callable[[], None], *words: str) -> None:
    """Assert that the attempt fails with an error of any class whose text contains all the words."""
    refusal: Exception | None = None
    try:
        attempt()
    except Exception as error:
        refusal = error
    assert refusal is not None, f"not refused; expected an error that says {' '.join(words)}"
    said = f"{type(refusal).__name__} {refusal}".lower()
    assert all(word in said for word in words), repr(refusal)
