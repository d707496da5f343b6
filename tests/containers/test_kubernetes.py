"""The chart and the manifests on a real Kubernetes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.containers.conftest import derive
from tests.containers.engine import Engine, NoEngineError, checked
from tests.containers.kubernetes import NODE, PAUSE, Cluster, missing
from tests.deploy.helm import missing as missing_helm
from tests.deploy.helm import program as helm
from tests.gateway_process import ROOT
from tests.postgres import CONTAINER_IMAGE, short_directory
from tests.steps.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

CLIENT = "sluice-test/client"
READY_SECONDS = 180

POSTGRES = f"""
apiVersion: v1
kind: Service
metadata: {{name: postgres}}
spec:
  selector: {{app: postgres}}
  ports: [{{port: 5432}}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {{name: postgres}}
spec:
  serviceName: postgres
  selector: {{matchLabels: {{app: postgres}}}}
  template:
    metadata: {{labels: {{app: postgres}}}}
    spec:
      containers:
        - name: postgres
          image: {CONTAINER_IMAGE}
          imagePullPolicy: IfNotPresent
          env:
            - {{name: POSTGRES_USER, value: sluice}}
            - {{name: POSTGRES_PASSWORD, value: secret}}
          readinessProbe:
            exec: {{command: [pg_isready, --host, localhost, --username, sluice]}}
            periodSeconds: 1
          volumeMounts: [{{name: data, mountPath: /var/lib/postgresql}}]
      volumes: [{{name: data, hostPath: {{path: DIRECTORY, type: DirectoryOrCreate}}}}]
"""
CLIENT_POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: client, labels: {{sluice-client: "true"}}}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - {{name: client, image: {CLIENT}, imagePullPolicy: IfNotPresent, command: [sleep, infinity]}}
"""


@pytest.fixture(scope="module")
def cluster(engine: Engine, image: str, postgres_image: str, newest: str) -> Iterator[Cluster]:
    """A Kubernetes that has all images, with Postgres and a pod for clients."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    pause = PAUSE.rpartition("/")[2]
    derive(engine, pause, f'FROM {newest}\nENTRYPOINT ["sleep", "infinity"]\n', {})
    install = "RUN apt-get update -qq && apt-get install -qq --yes --no-install-recommends kcat procps"
    derive(engine, CLIENT, f"FROM {newest}\n{install}\n", {})
    with short_directory() as directory:
        made = Cluster(directory)
        try:
            made.start()
        except NoEngineError as error:
            pytest.skip(str(error))
        try:
            made.load(engine, pause, image, postgres_image, CLIENT)
            made.kubectl("apply", "--filename=-", given=POSTGRES.replace("DIRECTORY", str(directory / "postgres")))
            made.kubectl("apply", "--filename=-", given=CLIENT_POD)
            made.kubectl("wait", "--for=condition=Ready", "pod/client", f"--timeout={READY_SECONDS}s")
            rolled_out(made, "postgres")
            url = "postgresql://sluice:secret@postgres:5432/sluice"
            made.kubectl("create", "secret", "generic", "sluice-database", f"--from-literal=url={url}")
            yield made
        finally:
            print(made.logs())
            made.stop()


def rolled_out(cluster: Cluster, name: str) -> None:
    try:
        cluster.kubectl("rollout", "status", f"statefulset/{name}", f"--timeout={READY_SECONDS}s")
    except AssertionError:
        print(cluster.try_kubectl("describe", "pods").stdout)
        print(cluster.try_kubectl("logs", f"--selector=app.kubernetes.io/name={name}", "--tail=50").stdout)
        raise


def in_client(cluster: Cluster, script: str, given: str | None = None) -> str:
    return cluster.kubectl("exec", "--stdin", "client", "--", "sh", "-c", script, given=given)


def names_of_nodes(cluster: Cluster) -> set[str]:
    """Return the addresses that a stock client learns."""
    listed = json.loads(in_client(cluster, "kcat -b sluice:9092 -L -J"))
    return {broker["name"] for broker in listed["brokers"]}


@contextmanager
def installed(cluster: Cluster, *values: str) -> Iterator[Callable[..., None]]:
    """Install the chart with these values, and remove it afterwards. The function that is returned upgrades it."""
    reason = missing_helm()
    if reason is not None:
        pytest.skip(reason)
    common = (str(ROOT / "deploy/helm/sluice"), "--set", "image.repository=sluice", "--set", "image.tag=latest")

    def run(verb: str, *arguments: str) -> None:
        command = cluster.inside(helm(), verb, "sluice", *arguments)
        checked(command, cluster.environment(), READY_SECONDS)

    def upgrade(*changed: str) -> None:
        run("upgrade", *common, *options((*values, *changed)))
        rolled_out(cluster, "sluice")

    run("install", *common, *options(values))
    try:
        rolled_out(cluster, "sluice")
        yield upgrade
    finally:
        run("uninstall", "--wait")


def options(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in ("--set-string", value)]


def pods(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the status of each node's pod."""
    listed = cluster.kubectl("get", "pods", "--selector=app.kubernetes.io/name=sluice", "--output=json")
    return [pod["status"] for pod in json.loads(listed)["items"]]


def ready(cluster: Cluster) -> int:
    return sum(
        condition["status"] == "True"
        for pod in pods(cluster)
        for condition in pod["conditions"]
        if condition["type"] == "Ready"
    )


def restarts(cluster: Cluster) -> int:
    return sum(container["restartCount"] for pod in pods(cluster) for container in pod["containerStatuses"])


def test_the_manifests_run_three_nodes_that_a_client_finds_by_their_names(cluster: Cluster) -> None:
    manifest = str(ROOT / "deploy/kubernetes/sluice.yaml")
    cluster.kubectl("apply", "--filename", manifest)
    try:
        rolled_out(cluster, "sluice")
        assert names_of_nodes(cluster) == {f"sluice-{n}.sluice-nodes.default.svc:9092" for n in range(3)}
        sent = "".join(f"{number}\n" for number in range(100))
        in_client(cluster, "kcat -P -b sluice:9092 -t manifests", sent)
        got = in_client(cluster, "kcat -C -b sluice:9092 -t manifests -e -q")
        assert sorted(got.split(), key=int) == sent.split()
    finally:
        cluster.kubectl("delete", "--filename", manifest)


def test_an_upgrade_and_more_nodes_lose_and_double_nothing_for_stock_clients(cluster: Cluster) -> None:
    produce = """
        n=1
        while ! test -e /tmp/stop; do echo $n; n=$((n + 1)); sleep 0.01; done |
        kcat -P -b sluice:9092 -t orders -X enable.idempotence=true -X topic.metadata.refresh.interval.ms=1000
    """
    consume = "exec kcat -b sluice:9092 -G readers -X auto.offset.reset=earliest -q -u orders >/tmp/got"
    with installed(cluster, "settings.num\\.partitions=6") as upgrade:
        in_client(cluster, "kcat -P -b sluice:9092 -t orders", "0\n")
        with (
            cluster.background("exec", "client", "--", "sh", "-c", produce) as producer,
            cluster.background("exec", "client", "--", "sh", "-c", consume),
        ):
            upgrade("podAnnotations.release=2")
            upgrade("podAnnotations.release=2", "replicas=4")
            in_client(cluster, "touch /tmp/stop")
            assert producer.wait(READY_SECONDS) == 0
            numbers = in_client(cluster, "kcat -C -b sluice:9092 -t orders -e -q | sort -n").split()
            assert numbers == [str(number) for number in range(len(numbers))]
            wait_for(
                lambda: int(in_client(cluster, "wc -l </tmp/got")),
                "the group did not read everything",
                holds=lambda count: count >= len(numbers),
            )
            in_client(cluster, "pkill -x kcat")
        assert in_client(cluster, "sort -n /tmp/got").split() == numbers
        assert restarts(cluster) == 0


def test_an_outage_of_postgres_makes_nodes_unready_and_restarts_none(cluster: Cluster) -> None:
    with installed(cluster):
        in_client(cluster, "kcat -P -b sluice:9092 -t kept", "before\n")
        cluster.kubectl("scale", "statefulset/postgres", "--replicas=0")
        wait_for(lambda: ready(cluster), "nodes are still ready", holds=lambda count: count == 0)
        assert restarts(cluster) == 0
        cluster.kubectl("scale", "statefulset/postgres", "--replicas=1")
        rolled_out(cluster, "postgres")
        wait_for(lambda: ready(cluster), "nodes are not ready again", holds=lambda count: count == 3)
        in_client(cluster, "kcat -P -b sluice:9092 -t kept", "after\n")
        assert in_client(cluster, "kcat -C -b sluice:9092 -t kept -e -q | sort").split() == ["after", "before"]
        assert restarts(cluster) == 0


def test_a_drained_machine_keeps_all_nodes_but_one_until_that_one_runs_elsewhere(cluster: Cluster) -> None:
    with installed(cluster):
        selector = "--pod-selector=app.kubernetes.io/name=sluice"
        drained = cluster.try_kubectl("drain", NODE, selector, "--delete-emptydir-data", "--force", "--timeout=15s")
        assert drained.returncode != 0
        assert "Cannot evict pod as it would violate the pod's disruption budget" in drained.stderr
        assert ready(cluster) == 2
        cluster.kubectl("uncordon", NODE)
        rolled_out(cluster, "sluice")


def test_with_one_shared_address_a_client_sees_one_broker_and_groups_work(cluster: Cluster) -> None:
    shared = "sluice-outside.default.svc"
    values = (f"external.host={shared}", "external.serviceType=ClusterIP")
    with installed(cluster, *values, "external.shared=true"):
        listed = json.loads(in_client(cluster, f"kcat -b {shared}:9094 -L -J"))
        assert [broker["name"] for broker in listed["brokers"]] == [f"{shared}:9094"]
        sent = "".join(f"{number}\n" for number in range(100))
        in_client(cluster, f"kcat -P -b {shared}:9094 -t shared", sent)
        read = f"kcat -b {shared}:9094 -G shared-readers -X auto.offset.reset=earliest -q -c 100 shared"
        assert sorted(in_client(cluster, read).split(), key=int) == sent.split()
