"""A gateway with a console, and a person who uses the console by HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.steps.waiting import wait_for

DEADLINE_S = 60.0

MEMBER = """
import sys, time
from confluent_kafka import Consumer
bootstrap, group, client, topic = sys.argv[1:5]
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": group, "client.id": client, "auto.offset.reset": "earliest",
    "session.timeout.ms": 6000, "heartbeat.interval.ms": 500, "auto.commit.interval.ms": 500,
    "partition.assignment.strategy": "cooperative-sticky"})
consumer.subscribe([topic], on_assign=lambda _, partitions: print("assigned", len(partitions), flush=True))
while True:
    consumer.poll(0.2)
"""


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Person:
    """A person with the cookies of a browser and the token of the page. The test sends the person's requests itself."""

    port: int
    host: str = "127.0.0.1"
    cookie: str = ""
    csrf: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def ask(
        self, method: str, route: str, body: Any = None, headers: Mapping[str, str] | None = None, /, **query: Any
    ) -> Answer:
        sent = {"Host": f"{self.host}:{self.port}", **self.headers}
        if self.cookie:
            sent["Cookie"] = self.cookie
        if body is not None:
            sent |= {"Content-Type": "application/json", "X-CSRF-Token": self.csrf}
        sent |= headers or {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            target = f"{route}?{urlencode(query)}" if query else route
            connection.request(method, target, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            answer = Answer(response.status, dict(response.headers.items()), response.read())
        finally:
            connection.close()
        if "Set-Cookie" in answer.headers:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return answer

    def get(self, route: str, /, **query: Any) -> Any:
        answer = self.ask("GET", f"/api/{route}", **query)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, path: str, body: Any) -> Answer:
        return self.ask("POST", f"/api/{path}", body)

    def enter(self) -> None:
        """Begin a session, as the page does when it loads."""
        self.csrf = self.get("session")["csrf"]

    def log_in(self, user: str, password: str) -> Answer:
        answer = self.post("login", {"user": user, "password": password})
        if answer.status == 200:
            self.csrf = answer.json["csrf"]
        return answer

    def act(self, **given: Any) -> Answer:
        """Request the plan of an action and execute the plan."""
        plan = self.post("action/plan", given)
        assert plan.status == 200, plan.body
        return self.post("action", {**given, "digest": plan.json["digest"]})


@dataclass
class Consoled:
    gateway: GatewayProcess
    port: int
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def person(self) -> Person:
        someone = Person(self.port)
        someone.enter()
        return someone

    def topic(self, name: str, partitions: int, settings: Mapping[str, str] | None = None) -> None:
        admin = AdminClient({"bootstrap.servers": self.gateway.bootstrap})
        admin.create_topics([NewTopic(name, partitions, config=dict(settings or {}))])[name].result(30)

    def produce(self, topic: str, records: list[tuple[Any, Any, Any]], partition: int = 0) -> None:
        """Write records, each as (key, value, headers)."""
        producer = Producer({"bootstrap.servers": self.gateway.bootstrap})
        for key, value, headers in records:
            producer.produce(topic, value, key, partition, headers=headers)
        assert producer.flush(30) == 0

    def join(self, group: str, client: str, topic: str) -> subprocess.Popen[bytes]:
        """Start a consumer in a process of its own, and wait until it owns partitions."""
        command = [sys.executable, "-c", MEMBER, self.gateway.bootstrap, group, client, topic]
        member = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.members.append(member)
        assert member.stdout is not None
        assert member.stdout.readline().startswith(b"assigned")
        return member

    def close(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()
            if member.stdout is not None:
                member.stdout.close()


def start_consoled(factory: GatewayFactory, settings: Mapping[str, str] | None = None, **given: Any) -> Consoled:
    (port,) = free_ports(1)
    gateway = factory({"console.listen": f"127.0.0.1:{port}", **(settings or {})}, **given)
    consoled = Consoled(gateway, port)
    wait_for(lambda: reaches(port), "the console answers")
    return consoled


def reaches(port: int) -> bool:
    try:
        return Person(port).ask("GET", "/").status == 200
    except OSError:
        return False
