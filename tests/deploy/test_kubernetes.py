"""The manifests and the chart: every object that they refer to exists, and a node accepts their settings."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
import yaml

from gateway.building.database import DATABASE_PATIENCE_S, LOCK_PATIENCE_S
from gateway.config.security import listener_security
from gateway.config.settings import Configuration, Settings, load
from storage.migrate import MIGRATION_PATIENCE_S
from tests.deploy.helm import missing, program
from tests.gateway_process import ROOT

P = ParamSpec("P")
T = TypeVar("T")

CHART = ROOT / "deploy/helm/sluice"
MANIFEST = ROOT / "deploy/kubernetes/sluice.yaml"
POD, NAMESPACE = "sluice-1", "messages"
DRAIN_MARGIN_S = 10
EVERYTHING = """
settings: {num.partitions: 3, log.retention.ms: "86400000"}
settingsSecretName: sluice-settings
tls: {secretName: sluice-tls}
external: {host: kafka-$(POD_INDEX).example.org, annotations: {a/b: "c"}}
env: [{name: AWS_REGION, value: eu-central-1}]
serviceAccountName: sluice
podAnnotations: {c/d: "e"}
nodeSelector: {disk: fast}
tolerations: [{key: messages, operator: Exists}]
imagePullSecrets: [{name: registry}]
networkPolicy: {clients: [{namespaceSelector: {}}], metrics: [{podSelector: {}}]}
"""
"""Values that turn on every option of the chart."""


def needs_helm(test: Callable[P, T]) -> Callable[P, T]:
    """Mark a test that renders the chart. It is a long test, because a build of Helm takes minutes."""
    return pytest.mark.long(pytest.mark.skipif(missing() is not None, reason=str(missing()))(test))


def helm(*arguments: str) -> str:
    done = subprocess.run([program(), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(values: Path | None = None) -> list[dict[str, Any]]:
    """Return the objects of the chart with these values."""
    more = () if values is None else ("--values", str(values))
    # A Helm that Go has built takes itself for one of Kubernetes 1.20.
    return parsed(helm("template", "sluice", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.30", *more))


def parsed(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = one(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return found


def configuration(objects: list[dict[str, Any]], directory: Path) -> Configuration:
    """Return the configuration of the pod sluice-1, with the files of its volumes below `directory`."""
    of_pod = {
        "metadata.name": POD,
        "metadata.namespace": NAMESPACE,
        "metadata.labels['apps.kubernetes.io/pod-index']": "1",
    }
    image = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    environment = dict(re.findall(r"\b(SLUICE_\w+)=(\S+)", image))
    for variable in container(objects)["env"]:
        text = variable.get("value")
        if text is None:
            text = of_pod[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        environment[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], text)
    contents = {
        "/etc/sluice/database/url": "postgresql://sluice:secret@db/sluice\n",
        "/etc/sluice/secret/settings": "num.network.threads=7\n",
        "/etc/sluice/tls/tls.key": "key",
        "/etc/sluice/tls/tls.crt": "chain",
        "/etc/sluice/tls/ca.crt": "authority",
    }
    contents |= {
        f"/etc/sluice/config/{name}": text
        for each in objects
        if each["kind"] == "ConfigMap"
        for name, text in each["data"].items()
    }
    mounts = {mount["mountPath"] for mount in container(objects)["volumeMounts"]}
    for path, content in contents.items():
        if str(Path(path).parent) in mounts:
            file = directory / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    for name, text in environment.items():
        if text.startswith("/etc/sluice/"):
            environment[name] = str(directory / text.lstrip("/"))
    sluice = {name: text for name, text in environment.items() if name.startswith("SLUICE_")}
    return load({}, (), sluice)


def settings(objects: list[dict[str, Any]], directory: Path) -> Settings:
    """Return the settings of `configuration`."""
    return configuration(objects, directory).settings


def check(objects: list[dict[str, Any]], directory: Path) -> None:
    """Assert that every object that the objects refer to exists, and that a node accepts its settings."""
    spec = one(objects, "StatefulSet")["spec"]
    pod, node = spec["template"]["spec"], container(objects)
    labels: Mapping[str, str] = {**spec["template"]["metadata"]["labels"], "apps.kubernetes.io/pod-index": "1"}
    ports = {port["name"]: port["containerPort"] for port in node["ports"]}
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}

    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy = one(objects, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    opened = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert sorted(opened) == sorted(ports)
    for service in services.values():
        assert {**labels, **service["selector"]}.keys() == labels.keys()
        assert all(port["targetPort"] in ports for port in service["ports"])
    assert services[spec["serviceName"]]["clusterIP"] == "None"

    loaded = configuration(objects, directory)
    assert not any("is ignored" in warning for warning in loaded.warnings)
    used = loaded.settings
    assert used.database_url == "postgresql://sluice:secret@db/sluice"
    assert used.database_url_file is not None
    names = {"kafka": "INSIDE", "outside": "OUTSIDE"}
    assert {names[port]: number for port, number in ports.items() if port in names} == {
        listener.name: listener.bind[1] for listener in used.listeners
    }
    assert used.metrics_listen == ("0.0.0.0", ports["metrics"])
    advertised = {listener.name: listener.advertised for listener in used.listeners}
    assert advertised["INSIDE"] == (f"{POD}.{spec['serviceName']}.{NAMESPACE}.svc", 9092)

    routes = set(re.findall(r'web\.get\("([^"]+)"', (ROOT / "gateway/operate/http.py").read_text()))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        target = node[probe]["httpGet"]
        assert (target["path"] in routes, target["port"]) == (True, "metrics")
    start_s = node["startupProbe"]["periodSeconds"] * node["startupProbe"]["failureThreshold"]
    assert start_s >= DATABASE_PATIENCE_S + LOCK_PATIENCE_S + MIGRATION_PATIENCE_S
    assert pod["terminationGracePeriodSeconds"] > used.drain_ms / 1000 + DRAIN_MARGIN_S

    image = (ROOT / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", image, re.MULTILINE)
    (data,) = re.findall(r"SLUICE_DATA_DIR=(\S+)", image)
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)
    assert pod["securityContext"]["runAsNonRoot"]
    assert node["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["name"]: mount for mount in node["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    writable = {mount["mountPath"] for name, mount in mounts.items() if "emptyDir" in volumes[name]}
    assert writable == {data, "/tmp"}
    assert all(mount.get("readOnly", False) for name, mount in mounts.items() if "emptyDir" not in volumes[name])


def test_the_manifest_names_what_exists_and_a_node_accepts_it(tmp_path: Path) -> None:
    check(parsed(MANIFEST.read_text()), tmp_path)


def test_the_page_uses_values_that_the_chart_has() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = (ROOT / "docs/kubernetes.md").read_text()
    given = re.findall(r"--set(?:-string)? '?([\w.]+)", text)
    assert given
    for block in re.findall(r"^```yaml\n# values.yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        given += [
            f"{name}.{inner}" if isinstance(part, dict) and values[name] else name
            for name, part in yaml.safe_load(block).items()
            for inner in (part if isinstance(part, dict) else [""])
        ]
    for path in given:
        found: Any = values
        for name in path.split("."):
            assert name in found, path
            found = found[name]


@needs_helm
def test_the_manifest_has_the_objects_that_the_chart_makes_by_default() -> None:
    def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(each["kind"], each["metadata"]["name"]): each for each in objects}

    assert by_name(parsed(MANIFEST.read_text())) == by_name(rendered())


@needs_helm
def test_the_chart_passes_helms_checks() -> None:
    helm("lint", "--strict", str(CHART))


@needs_helm
def test_every_option_of_the_chart_makes_settings_that_a_node_accepts(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(EVERYTHING)
    objects = rendered(values)
    check(objects, tmp_path)
    used = settings(objects, tmp_path)
    assert used.broker.num_partitions == 3
    assert used.broker.static["num.network.threads"] == "7"
    assert {listener.security_protocol for listener in used.listeners} == {"SSL"}
    outside = {listener.name: listener.advertised for listener in used.listeners}["OUTSIDE"]
    assert outside == ("kafka-1.example.org", 9094)
    pods = {each["metadata"]["name"] for each in objects if each["kind"] == "Service"}
    assert {"sluice-0", "sluice-1", "sluice-2"} <= pods
    assert {"name": "AWS_REGION", "value": "eu-central-1"} in container(objects)["env"]


@needs_helm
@pytest.mark.parametrize("tls", ["", "tls: {secretName: sluice-tls}"], ids=["plaintext", "tls"])
def test_one_service_leads_outside_clients_to_all_nodes(tls: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(f"external: {{host: kafka.example.org, shared: true}}\n{tls}")
    objects = rendered(values)
    check(objects, tmp_path)
    shared = {
        listener.name: listener.advertised for listener in settings(objects, tmp_path).listeners if listener.is_shared
    }
    assert shared == {"OUTSIDE": ("kafka.example.org", 9094)}
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    assert services.keys() == {"sluice", "sluice-nodes", "sluice-outside"}
    assert services["sluice-outside"]["selector"] == services["sluice"]["selector"]


@needs_helm
def test_a_setting_may_be_a_large_number_or_a_list(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("settings: {log.retention.ms: 86400000, log.cleanup.policy: [compact, delete]}")
    broker = settings(rendered(values), tmp_path).broker
    assert (broker.log_retention_ms, broker.log_cleanup_policy) == (86_400_000, ("compact", "delete"))


@needs_helm
def test_a_changed_setting_restarts_the_nodes(tmp_path: Path) -> None:
    def annotations(partitions: int) -> Any:
        values = tmp_path / "values.yaml"
        values.write_text(f"settings: {{num.partitions: {partitions}}}")
        return one(rendered(values), "StatefulSet")["spec"]["template"]["metadata"]["annotations"]

    assert annotations(1) != annotations(2)


@needs_helm
def test_listeners_may_demand_a_login(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "protocol: SASL_SSL\ntls: {secretName: sluice-tls}\nexternal: {host: kafka.example.org, shared: true}\n"
        "settings: {sasl.enabled.mechanisms: SCRAM-SHA-512}\n"
    )
    objects = rendered(values)
    check(objects, tmp_path)
    used = settings(objects, tmp_path)
    assert {listener.name for listener in used.listeners} == {"INSIDE", "OUTSIDE"}
    for listener in used.listeners:
        sasl = listener_security(listener, used.broker).sasl
        assert sasl is not None
        assert sasl.mechanisms == ("SCRAM-SHA-512",)


@needs_helm
def test_one_address_for_several_nodes_is_refused_unless_it_is_shared() -> None:
    arguments = ("template", "sluice", str(CHART), "--kube-version", "1.30", "--set", "external.host=kafka.example.org")
    done = subprocess.run([program(), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "set external.shared=true" in done.stderr
    helm(*arguments, "--set", "replicas=1")
