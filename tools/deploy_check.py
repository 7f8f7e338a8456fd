"""`make deploy-check`: judges the files of deploy/ by the tools of those who will read them.

    YAML          yamllint
    systemd       systemd-analyze verify, and security: what a unit leaves open
    Dockerfile    hadolint
    compose       the schema of compose files
    Helm          helm lint --strict and helm template, with several values; wrong values have to be refused;
                  what comes out has to be valid for Kubernetes, and each broker.yaml in it for a broker;
                  upgrades that would hide messages have to be refused, by what a Kubernetes would answer

The tools are those of .venv-deploy, except systemd-analyze (Debian: systemd), and helm: the one on PATH, else it is built by Go into
build/tools, once, which takes some minutes. Prints a line for each check; exit code 1 if one failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from protomq_broker.config import BrokerConfig
from protomq_namesrv.config import NamesrvConfig
from protomq_runtime.config import load_config

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/protomq"
TOOLS = ROOT / ".venv-deploy/bin"
HELM = "helm.sh/helm/v3/cmd/helm@v3.19.5"
KUBERNETES = ("1.29", "1.34")
"""The oldest that the chart is for, and a later one."""
EXPOSURE_MAX = "25"
"""In tenths, as systemd counts what a unit leaves open: 0 nothing, 100 everything."""
YAML_RULES = (
    "{extends: default, rules: {line-length: {max: 140}, document-start: disable,"
    " comments: {min-spaces-from-content: 1}, braces: {max-spaces-inside: 1}}}"
)
VALUES = {
    "three replicas": ("etcd.endpoints={http://etcd:2379}",),
    "two names, other settings": (
        "etcd.endpoints={http://etcd-0:2379,http://etcd-1:2379}",
        "broker.names={broker-a,broker-b}",
        "broker.config.store.retention_hours=24",
        "namesrv.replicas=3",
        "namesrv.config.route_threads=2",
        "broker.storage.storageClassName=local",
        "imagePullSecrets[0].name=registry",
    ),
    "an elected single one": ("etcd.endpoints={http://etcd:2379}", "broker.replicas=1", "broker.elected=true"),
    "single masters": ("broker.replicas=1", "broker.metricsPort=0", "podDisruptionBudget.enabled=false"),
}
WRONG_VALUES = {
    "set etcd.endpoints": ("broker.replicas=3",),
    "replica": ("etcd.endpoints={http://etcd:2379}", "broker.replica=3"),
    "every send would be refused": ("etcd.endpoints={http://etcd:2379}", "broker.minInSyncReplicas=4"),
    "no broker would start": ("etcd.endpoints={http://etcd:2379}", "broker.minInSyncReplicas=3"),
    "or broker.elected true": ("broker.replicas=1", "broker.elected=true"),
    "set etcd.endpoints.": ("broker.replicas=1", "broker.config.etcd.endpoints={http://etcd:2379}"),
    "broker.config.ha.min_in_sync_replicas is not yours to set, the chart does: set broker.minInSyncReplicas": (
        "etcd.endpoints={http://etcd:2379}",
        "broker.config.ha.min_in_sync_replicas=2",
    ),
    "broker.config.etcd is for brokers whose master is elected": ("broker.replicas=1", "broker.config.etcd.prefix=/mq"),
    "broker.config.broker_role is not yours to set": ("broker.replicas=1", "broker.config.broker_role=SYNC_MASTER"),
    "broker.config.broker_id is not yours to set": ("broker.replicas=1", "broker.config.broker_id=1"),
    "broker.config.metrics.listen is not yours to set": ("broker.replicas=1", "broker.config.metrics.listen=0.0.0.0:9000"),
    "broker.config.listen.advertised_host is not yours to set": ("broker.replicas=1", "broker.config.listen.advertised_host=broker"),
    "broker.config.listen is not yours to set": ("broker.replicas=1", "broker.config.listen=broker"),
    "namesrv.config.listen.grpc_port is not yours to set": ("broker.replicas=1", "namesrv.config.listen.grpc_port=9000"),
    "broker.names.0": ("broker.replicas=1", "broker.names={namesrv}"),
    "broker.names.1": ("broker.replicas=1", "broker.names={broker-a,namesrv-pods}"),
    "etcd.endpoints.0": ("etcd.endpoints={http://etcd:2379/v3}",),
    "etcd.endpoints.1": ("etcd.endpoints={http://etcd:2379,http://:2379}",),
    "etcd.endpoints.2": ("etcd.endpoints={http://etcd:2379,http://[::1]:2379,http://etcd:99999}",),
    "broker.metricsPort": ("broker.replicas=1", "broker.metricsPort=10911"),
    "clusterDomain": ("broker.replicas=1", "clusterDomain=cluster.local;"),
}
"""By what helm says of them. Each of them would end a broker with exit code 2, or two objects would have one name."""
ETCD = "etcd.endpoints={http://etcd:2379}"
OF_POD_0 = "in the volume of pod r-protomq-broker-a-0"


class Upgrade(NamedTuple):
    """Of an installed chart to other values."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    said: str
    """How helm refuses it; "": it does not."""
    first_pod: int = 1
    """The number of the installed first pod. Charts of earlier checkouts began single masters with 0."""


UPGRADES = (
    Upgrade(("broker.replicas=1",), (ETCD, "broker.replicas=3"), "broker-a is a single master"),
    Upgrade(("broker.replicas=1",), (ETCD, "broker.replicas=1", "broker.elected=true"), ""),
    Upgrade((ETCD, "broker.replicas=1", "broker.elected=true"), (ETCD, "broker.replicas=3"), ""),
    Upgrade((ETCD, "broker.replicas=3"), (ETCD, "broker.replicas=2"), ""),
    Upgrade((ETCD, "broker.replicas=3"), ("broker.replicas=1",), "broker-a has several replicas"),
    Upgrade((ETCD, "broker.replicas=3"), (ETCD, "broker.replicas=1", "broker.elected=true"), ""),
    Upgrade((ETCD, "broker.replicas=1", "broker.elected=true"), ("broker.replicas=1",), ""),
    Upgrade(("broker.replicas=1",), ("broker.replicas=1", "broker.names={broker-a,broker-b}"), "", first_pod=0),
    Upgrade(("broker.replicas=1",), (ETCD, "broker.replicas=3"), OF_POD_0, first_pod=0),
    Upgrade(("broker.replicas=1",), (ETCD, "broker.replicas=1", "broker.elected=true"), OF_POD_0, first_pod=0),
)


class Failure(Exception):
    """A check failed; the text says why."""


def run(*command: str | Path, **options: object) -> str:
    """stdout; Failure with all that it said if the exit code is not 0."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise Failure(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}".strip())
    return str(done.stdout)


def check_yaml() -> None:
    files = [path for path in DEPLOY.rglob("*.yaml") if "templates" not in path.parts]
    run(TOOLS / "yamllint", "--strict", "-d", YAML_RULES, *sorted(files))


def check_units() -> None:
    if shutil.which("systemd-analyze") is None:
        raise Failure("there is no systemd-analyze (Debian, Ubuntu: apt-get install systemd)")
    with tempfile.TemporaryDirectory() as folder:
        for unit in sorted([*DEPLOY.glob("systemd/*.service"), *DEPLOY.glob("*.service")]):
            # Nothing is installed here where the units expect it, and their users do not exist.
            text = "\n".join(_as_here(line) for line in unit.read_text().splitlines())
            copy = Path(folder) / unit.name
            copy.write_text(text)
            said = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
            ).stderr
            ours = [line for line in said.splitlines() if unit.stem.rstrip("@") in line]
            if ours:
                raise Failure("\n".join(ours))
            if unit.parent.name == "systemd":
                run("systemd-analyze", "security", "--no-pager", "--offline=true", f"--threshold={EXPOSURE_MAX}", copy)


def _as_here(line: str) -> str:
    if line.startswith("Exec"):
        name, _, command = line.partition("=")
        return f"{name}=/bin/true {command.partition(' ')[2]}"
    return "" if line.startswith(("User=", "Group=", "WorkingDirectory=/opt")) else line


def check_dockerfile() -> None:
    run(TOOLS / "hadolint", DEPLOY / "Dockerfile")


def check_compose() -> None:
    run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose/compose.yaml")


def check_chart() -> None:
    helm = find_helm()
    for name, settings in VALUES.items():
        run(helm, "lint", "--strict", CHART, *_given(settings))
        for version in KUBERNETES:
            rendered = run(helm, "template", "r", CHART, "--namespace=n", f"--kube-version={version}.0", *_given(settings))
            count = check_objects(rendered, version)
            print(f"    {name}, Kubernetes {version}: {count} objects", flush=True)
    for said, settings in WRONG_VALUES.items():
        try:
            run(helm, "template", "r", CHART, f"--kube-version={KUBERNETES[-1]}.0", *_given(settings))
        except Failure as failure:
            if said.replace(".", "") in str(failure).replace("/", "").replace(".", ""):
                continue
            raise
        raise Failure(f"helm took values that are wrong: {' '.join(settings)}")
    for upgrade in UPGRADES:
        check_upgrade(helm, upgrade)


def check_upgrade(helm: Path, upgrade: Upgrade) -> None:
    """Helm asks the cluster what is installed. It refuses the upgrade, or each broker keeps the number of its first pod."""
    command = (helm, "template", "r", CHART, "--namespace=n", f"--kube-version={KUBERNETES[-1]}.0")
    before = _stateful_sets(run(*command, *_given(upgrade.before)))
    for each in before.values():
        each["spec"].setdefault("ordinals", {})["start"] = upgrade.first_pod
    with cluster_that_has(before) as url:
        try:
            rendered = run(*command, "--dry-run=server", f"--kube-apiserver={url}", *_given(upgrade.after))
        except Failure as failure:
            if upgrade.said and upgrade.said in str(failure):
                return
            raise
    if upgrade.said:
        raise Failure(f"helm took an upgrade that hides messages: {upgrade.before} -> {upgrade.after}")
    for name, each in _stateful_sets(rendered).items():
        start = each["spec"].get("ordinals", {}).get("start", 0)
        expected = upgrade.first_pod if name in before else 1
        if "namesrv" not in name and start != expected:
            raise Failure(f"the first pod of {name} becomes {start}, it was {expected}: {upgrade.before} -> {upgrade.after}")


def _stateful_sets(rendered: str) -> dict[str, dict[str, Any]]:
    objects = [each for each in yaml.safe_load_all(rendered) if each]
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == "StatefulSet"}


@contextmanager
def cluster_that_has(stateful_sets: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The URL of what answers helm as a Kubernetes does that has these in the namespace n, and nothing else."""
    verbs = ["get", "list"]
    resources = [{"name": "statefulsets", "singularName": "statefulset", "namespaced": True, "kind": "StatefulSet", "verbs": verbs}]
    apps = {"groupVersion": "apps/v1", "version": "v1"}
    answers: dict[str, object] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [{"name": "apps", "versions": [apps], "preferredVersion": apps}],
        },
        "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": resources},
    }
    for name, each in stateful_sets.items():
        answers[f"/apis/apps/v1/namespaces/n/statefulsets/{name}"] = each

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].rstrip("/")
            unknown = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(answers.get(path, unknown)).encode()
            self.send_response(200 if path in answers else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _given(settings: Sequence[str]) -> list[str]:
    return [f"--set={setting}" for setting in settings]


def check_objects(rendered: str, version: str) -> int:
    """They are valid for that Kubernetes, and what they configure is valid for a broker and a name server; how many they are."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "all.yaml"
        file.write_text(rendered)
        run(TOOLS / "kubernetes-validate", "--strict", "--kubernetes-version", version, file)
        objects = [each for each in yaml.safe_load_all(rendered) if each]
        pods = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "StatefulSet"}
        for each in objects:
            if each["kind"] != "ConfigMap":
                continue
            workload = pods[each["metadata"]["name"]]
            for name, text in each["data"].items():
                settings = Path(folder) / name
                settings.write_text(text)
                kind: type = NamesrvConfig if name == "namesrv.yaml" else BrokerConfig
                load_config(kind, settings, environment=dict(environment_of(workload)))
        return len(objects)


def environment_of(workload: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Of the first pod; its name and number stand for what Kubernetes fills in."""
    start = workload.get("ordinals", {}).get("start", 0)
    for variable in workload["template"]["spec"]["containers"][0].get("env", ()):
        if variable["name"] != "POD_NAME":
            yield variable["name"], variable.get("value", str(start)).replace("$(POD_NAME)", "pod-1")


def find_helm() -> Path:
    """The one on PATH, or one that is built; Failure if there is neither."""
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    built = ROOT / "build/tools/helm"
    if not built.exists():
        if shutil.which("go") is None:
            raise Failure("there is no helm, and no go to build one: install helm 3 (https://helm.sh)")
        print(f"    building {HELM}", flush=True)
        built.parent.mkdir(parents=True, exist_ok=True)
        run("go", "install", HELM, env={**os.environ, "GOBIN": str(built.parent)}, cwd=built.parent)
    return built


CHECKS: dict[str, Callable[[], None]] = {
    "YAML": check_yaml,
    "systemd units": check_units,
    "Dockerfile": check_dockerfile,
    "compose file": check_compose,
    "Helm chart": check_chart,
}


def main(names: Sequence[str]) -> int:
    failed = 0
    for name, check in CHECKS.items():
        if names and name not in names:
            continue
        try:
            check()
            print(f"ok      {name}", flush=True)
        except Failure as failure:
            failed += 1
            print(f"FAILED  {name}\n{failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
