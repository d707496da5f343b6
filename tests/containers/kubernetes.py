"""A small real Kubernetes for one test run: one node whose programs Go builds from their modules.

The one idea: nothing is pulled, and nothing of it can be seen outside. All programs run in a network namespace of their
own, so their addresses and packet filters end with the namespace. Pods use images that were imported beforehand. The
namespace has no way out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.containers.engine import Engine, NoEngineError
from tests.gateway_process import clean_environment
from tests.go_programs import BUILDS, built, run_go
from tests.steps.waiting import wait_for

VERSION = "v1.34.4"
"""The newest release whose kubelet accepts version 1 of control groups by default."""
ETCD = "etcd"
DNS = ("github.com/coredns/coredns", "v1.12.4")
PLUGINS, PLUGINS_VERSION = "github.com/containernetworking/plugins/plugins", "v1.8.0"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
NEEDS = ("go", "containerd", "ctr", "runc", "kubectl", "ip", "nsenter", "iptables", "openssl")

NAMESPACE = "sluice-k8s"
NODE, NODE_ADDRESS, DNS_ADDRESS = "node-1", "10.123.0.1", "10.123.0.53"
PODS, SERVICES = "10.244.0.0/24", "10.96.0.0/16"
API = f"https://{NODE_ADDRESS}:6443"
TOKEN = "test"
"""The token of every program and of the test. No other machine can reach the server."""
PAUSE = "docker.io/library/sluice-pause:latest"
"""The image of the container that holds a pod's network. It waits for its end."""
START_SECONDS = 120.0
STOP_SECONDS = 30.0
COMMAND_SECONDS = 180.0
LOG_TAIL_CHARACTERS = 3000

STATIC = {"CGO_ENABLED": "0"}
_BUILT_IN = "k8s.io/component-base/version"


def missing() -> str | None:
    """Return why this machine cannot run the cluster. Return None if no reason is known before a start is tried."""
    absent = [name for name in NEEDS if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "a cluster is started by root"
    return f"{', '.join(absent)} not installed" if absent else None


def programs() -> Path:
    """Return the folder of Kubernetes' own programs. Build them if it does not have them yet.

    `go install` refuses the module, because its go.mod replaces the modules that Kubernetes publishes with folders of
    its repository. So a module of ours replaces them with the published versions.
    """
    folder = BUILDS / "kubernetes" / VERSION
    if all((folder / name).exists() for name in (*PROGRAMS, ETCD)):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    described = json.loads(run_go("mod", "download", "-json", f"k8s.io/kubernetes@{VERSION}", directory=folder))
    lines = Path(described["GoMod"]).read_text().splitlines()
    published = [line.split()[0] for line in lines if "=> ./staging/" in line]
    of_modules = f"v0{VERSION.removeprefix('v1')}"
    (folder / "go.mod").write_text(
        f"module cluster\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes {VERSION}\n\n"
        + "".join(f"replace {name} => {name} {of_modules}\n" for name in published)
    )
    needed = [*(f"k8s.io/kubernetes/cmd/{name}/app" for name in PROGRAMS), "go.etcd.io/etcd/server/v3/etcdmain"]
    (folder / "programs.go").write_text("".join(["package programs\n", *(f'import _ "{name}"\n' for name in needed)]))
    run_go("mod", "tidy", directory=folder)
    major, minor, _patch = VERSION.removeprefix("v").split(".")
    values = {"gitVersion": VERSION, "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X {_BUILT_IN}.{name}={value}" for name, value in values.items())])
    packages = [f"k8s.io/kubernetes/cmd/{name}" for name in PROGRAMS]
    run_go("build", "-trimpath", "-ldflags", flags, "-o", f"{folder}/", *packages, directory=folder, environment=STATIC)
    of_etcd = ("-o", str(folder / ETCD), "go.etcd.io/etcd/server/v3")
    run_go("build", "-trimpath", *of_etcd, directory=folder, environment=STATIC)
    return folder


class Cluster:
    """One node, which keeps its files in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._config = directory / "kubeconfig"
        self._socket = directory / "containerd.sock"

    def start(self) -> None:
        """Start all programs and wait until the node is ready. Raise NoEngineError with the end of their logs if it is
        not.
        """
        of_kubernetes = programs()
        dns = built(*DNS, "coredns/" + DNS[1])
        plugins = f"cni/{PLUGINS_VERSION}"
        for name in ("main/bridge", "main/loopback", "ipam/host-local"):
            self._plugins = built(f"{PLUGINS}/{name}", PLUGINS_VERSION, plugins).parent
        try:
            self._make_network()
            self._write_files()
            self._start_programs(of_kubernetes, dns)
        except (AssertionError, subprocess.SubprocessError) as error:
            said = self.logs()
            self.stop()
            raise NoEngineError(f"Kubernetes does not serve here: {error}\n{said}") from error

    def _start_programs(self, of_kubernetes: Path, dns: Path) -> None:
        at = self._directory
        clients, peers = f"http://{NODE_ADDRESS}:2379", f"http://{NODE_ADDRESS}:2380"
        config = f"--kubeconfig={self._config}"
        self._run(
            *(
                of_kubernetes / ETCD,
                "--data-dir",
                at / "etcd",
                "--listen-client-urls",
                clients,
                "--advertise-client-urls",
                clients,
            ),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}", "--log-level", "warn"),
        )
        self._run("containerd", "--config", at / "containerd.toml")
        self._run(
            *(of_kubernetes / "kube-apiserver", f"--etcd-servers={clients}", f"--cert-dir={at / 'certificates'}"),
            *(f"--bind-address={NODE_ADDRESS}", f"--advertise-address={NODE_ADDRESS}", "--secure-port=6443"),
            *(f"--service-cluster-ip-range={SERVICES}", f"--token-auth-file={at / 'tokens.csv'}", "--allow-privileged"),
            "--kubelet-preferred-address-types=InternalIP",
            *("--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC"),
            *(f"--service-account-signing-key-file={at / 'account.key'}",),
            *(f"--service-account-key-file={at / 'account.key'}",),
        )
        self._await("the API server", "get", "--raw", "/readyz")
        self._run(
            *(of_kubernetes / "kube-controller-manager", config, "--leader-elect=false"),
            *(f"--service-account-private-key-file={at / 'account.key'}",),
            *(f"--root-ca-file={at / 'certificates/apiserver.crt'}",),
        )
        self._run(of_kubernetes / "kube-scheduler", config, "--leader-elect=false")
        self._run(
            *(of_kubernetes / "kube-proxy", config, "--proxy-mode=iptables", f"--cluster-cidr={PODS}"),
            *(f"--hostname-override={NODE}", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
            *("--conntrack-tcp-timeout-close-wait=0",),
        )
        self._run(dns, "-conf", at / "Corefile")
        self._run(
            *(of_kubernetes / "kubelet", config, f"--config={at / 'kubelet.yaml'}", f"--hostname-override={NODE}"),
            *(f"--node-ip={NODE_ADDRESS}", f"--root-dir={at / 'kubelet'}"),
        )
        self._await("the node", "wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=1s")
        self._await("the default account", "get", "serviceaccount", "default")

    def stop(self) -> None:
        """End all pods and programs, and remove the network."""
        if self._processes and self._socket.exists():
            self._remove_pods()
        for _, process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for _, process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        mounted = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in reversed([place for place in mounted if place.is_relative_to(self._directory)]):
            subprocess.run(["umount", str(place)], check=True, timeout=STOP_SECONDS)
        subprocess.run(["ip", "netns", "delete", NAMESPACE], capture_output=True, timeout=STOP_SECONDS)

    def _remove_pods(self) -> None:
        """Delete all pods and wait for their end, because a container outlives containerd."""
        kinds = "statefulsets,deployments,pods"
        self.try_kubectl("delete", kinds, "--all", "--grace-period=1", f"--timeout={STOP_SECONDS:.0f}s")

    def kubectl(self, *arguments: str, given: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
        """Return kubectl's output. Raise AssertionError with all that it printed if it fails."""
        done = self.try_kubectl(*arguments, given=given, seconds=seconds)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}"
        return done.stdout

    def try_kubectl(
        self, *arguments: str, given: str | None = None, seconds: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl, whether it succeeds or not."""
        return subprocess.run(
            [*self._command(), *arguments],
            input=given,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    @contextlib.contextmanager
    def background(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run kubectl in the background, and end it at the end of the block if it still runs."""
        process = subprocess.Popen([*self._command(), *arguments], env=self.environment(), stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def inside(self, *command: str | Path) -> list[str]:
        """Return the command, run in the cluster's network."""
        return ["nsenter", f"--net=/run/netns/{NAMESPACE}", *map(str, command)]

    def environment(self) -> dict[str, str]:
        """Return the environment for programs that find the cluster by KUBECONFIG."""
        return {**clean_environment(), "KUBECONFIG": str(self._config)}

    def load(self, engine: Engine, *images: str) -> None:
        """Copy images of the engine into the cluster. `PAUSE` must be one of them."""
        with subprocess.Popen(
            engine.command("save", *images), env=engine.environment(), stdout=subprocess.PIPE
        ) as saved:
            subprocess.run(
                ["ctr", "--address", str(self._socket), "--namespace", "k8s.io", "images", "import", "-"],
                stdin=saved.stdout,
                capture_output=True,
                check=True,
                timeout=COMMAND_SECONDS,
            )
        assert saved.returncode == 0

    def logs(self) -> str:
        """Return the end of each program's log."""
        return "\n".join(
            f"--- {name}\n{self._log(name).read_text(errors='replace')[-LOG_TAIL_CHARACTERS:]}"
            for name, _ in self._processes
        )

    def _command(self) -> list[str]:
        return self.inside("kubectl")

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _run(self, program: str | Path, *arguments: str | Path) -> None:
        name = Path(program).name
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                self.inside(program, *arguments),
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append((name, process))

    def _await(self, what: str, *arguments: str) -> None:
        """Repeat a kubectl command until it succeeds. Raise AssertionError if a program of the cluster ends."""

        def succeeds() -> bool:
            ended = [name for name, process in self._processes if process.poll() is not None]
            assert not ended, f"{', '.join(ended)} ended while {what} was awaited"
            return self.try_kubectl(*arguments).returncode == 0

        wait_for(succeeds, f"{what} is not ready", seconds=START_SECONDS)

    def _make_network(self) -> None:
        """Make the namespace with one interface, which has the addresses of the node and of the name server."""
        for command in (
            ["ip", "netns", "add", NAMESPACE],
            self.inside("ip", "link", "set", "lo", "up"),
            self.inside("ip", "link", "add", "node", "type", "bridge"),
            self.inside("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "node"),
            self.inside("ip", "address", "add", f"{DNS_ADDRESS}/24", "dev", "node"),
            self.inside("ip", "link", "set", "node", "up"),
            self.inside("ip", "route", "add", "default", "dev", "node"),
            self.inside("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"),
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=STOP_SECONDS)

    def _write_files(self) -> None:
        at = self._directory
        subprocess.run(
            ["openssl", "genrsa", "-out", str(at / "account.key"), "2048"],
            check=True,
            capture_output=True,
            timeout=STOP_SECONDS,
        )
        (at / "tokens.csv").write_text(f"{TOKEN},test,test,system:masters\n")
        self._config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
                    "users": [{"name": "u", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "c",
                }
            )
        )
        (at / "Corefile").write_text(
            f"""\
.:53 {{
  bind {DNS_ADDRESS}
  errors
  kubernetes cluster.local {{
    kubeconfig {self._config}
  }}
}}
"""
        )
        (at / "kubelet.yaml").write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "kubelet.config.k8s.io/v1beta1",
                    "kind": "KubeletConfiguration",
                    "address": NODE_ADDRESS,
                    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
                    "authorization": {"mode": "AlwaysAllow"},
                    "cgroupDriver": "cgroupfs",
                    "clusterDNS": [DNS_ADDRESS],
                    "clusterDomain": "cluster.local",
                    "containerRuntimeEndpoint": f"unix://{self._socket}",
                    "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
                    "failSwapOn": False,
                    "imageGCHighThresholdPercent": 100,
                    "podLogsDir": str(at / "pods"),
                    "resolvConf": "",
                }
            )
        )
        networks = at / "networks"
        networks.mkdir()
        (networks / "10-bridge.conflist").write_text(
            json.dumps(
                {
                    "cniVersion": "1.0.0",
                    "name": "pods",
                    "plugins": [
                        {
                            "type": "bridge",
                            "bridge": "pods",
                            "isGateway": True,
                            "hairpinMode": True,
                            "ipam": {
                                "type": "host-local",
                                "dataDir": str(at / "addresses"),
                                "ranges": [[{"subnet": PODS}]],
                                "routes": [{"dst": "0.0.0.0/0"}],
                            },
                        }
                    ],
                }
            )
        )
        (at / "containerd.toml").write_text(
            f"""\
version = 2
root = "{at / "containerd"}"
state = "{at / "containers"}"
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{self._plugins}"
    conf_dir = "{networks}"
"""
        )
