"""Admin scenarios: topics, configs, groups."""

from __future__ import annotations

from tests.compat.python.client import MemberOptions, Record, wait_until
from tests.compat.python.scenario import Run, scenario


@scenario("admin.topics")
def topics(run: Run) -> None:
    client = run.client
    topic = run.topic(2)
    assert client.partitions(topic) == 2
    client.add_partitions(topic, 5)
    wait_until(lambda: client.partitions(topic) == 5, "five partitions")
    try:
        client.create_topic(topic, 1)
    except Exception as error:  # whatever the library makes of TOPIC_ALREADY_EXISTS
        assert "exist" in f"{type(error).__name__} {error}".lower(), f"created twice: {error!r}"
    else:
        raise AssertionError("a topic was created twice")
    client.delete_topic(topic)
    wait_until(lambda: client.partitions(topic) is None, "the topic is gone")


@scenario("admin.configs")
def configs(run: Run) -> None:
    client = run.client
    topic = run.topic(1)
    assert client.topic_config(topic, "cleanup.policy") == "delete"
    client.set_topic_config(topic, "retention.ms", "3600000")
    wait_until(lambda: client.topic_config(topic, "retention.ms") == "3600000", "retention.ms is altered")
    assert client.topic_config(topic, "cleanup.policy") == "delete"


@scenario("admin.groups")
def groups(run: Run) -> None:
    client = run.client
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
    try:
        client.delete_group(group)
    except Exception as error:  # whatever the library makes of NON_EMPTY_GROUP
        said = f"{type(error).__name__} {error}".lower().replace("_", "").replace(" ", "")
        assert "nonempty" in said or "notempty" in said, f"{error!r}"
    else:
        raise AssertionError("a group with a member was deleted")
    member.stop()
    wait_until(lambda: client.group_state(group) == ("Empty", 0) or client.group_state(group)[1] == 0, "it is empty")
    assert client.committed(group, topic, 0) == 1
    client.commit(group, topic, {0: 0})
    assert client.committed(group, topic, 0) == 0
    client.delete_group(group)
    wait_until(lambda: group not in client.groups(), "it is deleted")
    assert client.committed(group, topic, 0) is None
