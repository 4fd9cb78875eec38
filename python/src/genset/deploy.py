"""`genset deploy MODULE:CLASS --target compose|kubernetes --out DIR`: manifests for a class and the services it depends on.

Each service is a container of its image, which has this package and the module; beside them stand a frontend for HTTP and etcd. The
files are written to be read and changed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genset.runtime import KILL_S
from genset.sdk import IMAGE, ServiceSpec, parse_cpu, parse_gpus
from genset.serve import CONFIG_VARIABLE, STATUS_VARIABLE, UsageError, adjusted, check_names, configuration, load

ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.21"
HTTP_PORT = 8000
WIRE_PORT = 7480
STATUS_PORT = 9090
GRACE_S = int(KILL_S)
"""Longer than a service may take to drain and to exit."""
IMAGE_USER = 10001
"""The user id in containers of our image."""
MODEL_CACHE = "/var/cache/genset/huggingface"
"""The container's path of the Hugging Face Hub cache. In our image its user owns the folder."""
HF_SECRET = "hf-token"
"""The Kubernetes secret that contains `HF_TOKEN`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 2 if the services cannot be deployed or the file cannot be written."""
    parser = argparse.ArgumentParser(prog="genset deploy", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target_class", metavar="MODULE:CLASS")
    parser.add_argument("--target", choices=["compose", "kubernetes"], required=True)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for the file; it is made")
    parser.add_argument("--image", help="image of services that name none of their own (default: GENSET_IMAGE)")
    parser.add_argument("-f", "--file", metavar="FILE", help="as for genset serve")
    parser.add_argument(
        "--model-cache",
        metavar="NAME",
        help="cache of the Hugging Face Hub that all services share: a volume in compose, a claim of a volume in Kubernetes",
    )
    parser.add_argument(
        "--hf-token",
        action="store_true",
        help=f"services get HF_TOKEN: in compose from the environment of docker compose, in Kubernetes from the secret {HF_SECRET}",
    )
    parsed, settings = parser.parse_known_args(arguments)
    try:
        graph = list(load(parsed.target_class).graph())
        told = configuration(parsed.file, settings, [each.name for each in graph])
        hub = Hub.of(parsed.model_cache, parsed.hf_token)
        services = [_Deployed(each, parsed.target_class, parsed.image, told.get(each.name, {})) for each in adjusted(graph, told)]
        check_names([(each.spec, name) for each in services for name in each.names(parsed.target)], BESIDE)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    image = services[-1].image
    if parsed.target == "compose":
        documents, name = [compose(services, image, hub)], "compose.yaml"
    else:
        documents, name = kubernetes(services, image, hub), "graph.yaml"
    path = parsed.out / name
    # An existing file stays until the new one is complete.
    part = parsed.out / f".{name}.part"
    try:
        parsed.out.mkdir(parents=True, exist_ok=True)
        part.write_text("---\n".join(to_yaml(document) for document in documents))
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        print(f"error: {parsed.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(path)
    return 0


_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Hub:
    """What the services get from the Hugging Face Hub."""

    cache: str = ""
    """The volume, or the claim of one, that they share; empty if each has its own files."""
    has_token: bool = False

    @staticmethod
    def of(cache: str | None, has_token: bool) -> Hub:
        """Returns the requested settings; raises `UsageError` for an invalid volume name."""
        if cache is not None and not _NAME.fullmatch(cache):
            raise UsageError(f"--model-cache {cache}: must be a name in lower case, of a volume or of a claim of one, such as models")
        return Hub(cache or "", has_token)

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_HOME": MODEL_CACHE} if self.cache else {}


class _Deployed:
    """A service and its container."""

    def __init__(self, spec: ServiceSpec, target: str, image: str | None, told: Mapping[str, Any]) -> None:
        self.spec = spec
        # A service whose image is the environment's counts as naming none, even if it sets `image=IMAGE` explicitly.
        self.image = (image or IMAGE) if spec.image == IMAGE else spec.image
        if not self.image:
            raise UsageError(f"{spec.name} has no image: set it in @service(image=...), --image or GENSET_IMAGE")
        # Deployed names are in lower case.
        self.name = spec.name.lower().replace("_", "-")
        self.command = ["python", "-u", "-m", "genset._service", target, spec.name]
        self.environment = {**FLEET, **LISTENING, **STATUS, CONFIG_VARIABLE: json.dumps(told)}

    @property
    def gpus(self) -> int:
        return parse_gpus(self.spec.resources.get("gpu", "0"))

    def names(self, target: str) -> list[str]:
        """Its names there. In compose all containers of one name have the same devices, so workers with GPUs get separate names."""
        workers = self.spec.workers
        return [f"{self.name}-{worker}" for worker in range(workers)] if target == "compose" and self.gpus and workers > 1 else [self.name]


BESIDE = {"etcd": "etcd itself", "http": "the frontend for HTTP"}
"""The other containers, by name."""
FLEET = {"GENSET_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": "http://etcd:2379"}
LISTENING = {"GENSET_WIRE_HOST": "0.0.0.0", "GENSET_WIRE_PORT": str(WIRE_PORT)}
STATUS = {"GENSET_STATUS_HOST": "0.0.0.0", STATUS_VARIABLE: str(STATUS_PORT)}
HTTP_COMMAND = ["genset", "run", "in=http", "out=dyn", "--http-host=0.0.0.0", f"--http-port={HTTP_PORT}"]
ETCD_COMMAND = [
    "/usr/local/bin/etcd",
    "--listen-client-urls=http://0.0.0.0:2379",
    "--advertise-client-urls=http://etcd:2379",
]
START_S = 1800
"""How long a service may take until it responds: it imports its modules first."""
PERIOD_S, TIMEOUT_S = 5, 5
STATUS_OF_CONTAINER = {"name": "status", "containerPort": STATUS_PORT}
LEAVING_S = 10
"""How long the frontend waits for its SIGTERM in Kubernetes, until the Service sends it nothing more: from then on it refuses requests."""
HTTP_FAILURES = 2
"""The number of failed checks in a row after which the frontend is not ready."""


def _ready_path(services: Sequence[_Deployed]) -> str:
    """The path that tells whether the frontend is ready: with a model, or, in a graph without models, once it runs. Models that only
    `on_start` registers are unknown here."""
    return "/ready" if any(each.spec.models for each in services) else "/live"


def _healthcheck(port: int, path: str, retries: int) -> dict[str, Any]:
    return {
        "test": ["CMD", "python", "-c", f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}')"],
        "interval": f"{PERIOD_S}s",
        "timeout": f"{TIMEOUT_S}s",
        "start_period": f"{START_S}s",
        "retries": retries,
    }


def compose(services: Sequence[_Deployed], image: str | None, hub: Hub = Hub()) -> dict[str, Any]:
    """Returns the docker compose file."""
    made: dict[str, Any] = {
        "etcd": {"image": ETCD_IMAGE, "command": ETCD_COMMAND, "restart": "on-failure"},
        "http": {
            "image": image,
            "command": HTTP_COMMAND,
            "environment": {**FLEET, **STATUS},
            "healthcheck": _healthcheck(HTTP_PORT, _ready_path(services), HTTP_FAILURES),
            "ports": [f"127.0.0.1:{HTTP_PORT}:{HTTP_PORT}"],
            "depends_on": ["etcd"],
            "stop_grace_period": f"{GRACE_S}s",
            "restart": "on-failure",
        },
    }
    devices = map(str, itertools.count())
    known = {each.spec.cls: each.names("compose") for each in services}
    for each in services:
        names = known[each.spec.cls]
        # Compose stops a container before those that it depends on, which its requests in progress may still call.
        needed = [name for other in each.spec.dependencies.values() for name in known.get(other, [])]
        for name in names:
            # With a `count` every container would get the machine's first devices.
            mine = list(itertools.islice(devices, each.gpus))
            made[name] = _compose_service(each, each.spec.workers // len(names), mine, hub)
            made[name]["depends_on"] = ["etcd", *needed]
    whole: dict[str, Any] = {"services": made}
    if hub.cache:
        whole["volumes"] = {hub.cache: {}}
    return whole


def _compose_service(each: _Deployed, replicas: int, devices: Sequence[str], hub: Hub) -> dict[str, Any]:
    cpu, memory = each.spec.resources.get("cpu"), each.spec.resources.get("memory")
    limits = {"cpus": None if cpu is None else f"{parse_cpu(cpu):g}", "memory": _compose_bytes(memory)}
    resources: dict[str, Any] = {"limits": {key: value for key, value in limits.items() if value is not None}}
    if devices:
        resources["reservations"] = {"devices": [{"driver": "nvidia", "device_ids": list(devices), "capabilities": ["gpu"]}]}
    # A variable without a value is passed on from the environment of `docker compose`.
    token: dict[str, None] = {"HF_TOKEN": None} if hub.has_token else {}
    return {
        "image": each.image,
        # Each replica advertises its own address.
        "entrypoint": ["/bin/sh", "-c", 'GENSET_ADVERTISE_HOST=$$(hostname -i) exec "$$0" "$$@"'],
        "command": each.command,
        "environment": {key: value.replace("$", "$$") for key, value in each.environment.items()} | hub.environment | token,
        **({"volumes": [f"{hub.cache}:{MODEL_CACHE}"]} if hub.cache else {}),
        "healthcheck": _healthcheck(STATUS_PORT, "/ready", 3),
        "stop_grace_period": f"{GRACE_S}s",
        "restart": "on-failure",
        "deploy": {"replicas": replicas, "resources": resources},
    }


def _compose_bytes(memory: str | None) -> str | None:
    """Compose counts in powers of two and omits the `i`."""
    return None if memory is None else memory.replace("i", "").lower()


def kubernetes(services: Sequence[_Deployed], image: str | None, hub: Hub = Hub()) -> list[dict[str, Any]]:
    """Returns the manifests, for `kubectl apply -f`."""
    http = {
        "name": "http",
        "image": image,
        "command": HTTP_COMMAND,
        "env": _env({**FLEET, **STATUS}),
        "ports": [{"name": "http", "containerPort": HTTP_PORT}, STATUS_OF_CONTAINER],
        **_probes(_asks(_ready_path(services), HTTP_FAILURES, "http")),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVING_S)]}}},
    }
    documents = [
        _kubernetes_service("etcd", 2379),
        _deployment("etcd", {"name": "etcd", "image": ETCD_IMAGE, "command": ETCD_COMMAND}),
        _kubernetes_service("http", HTTP_PORT),
        _deployment("http", http),
    ]
    for each in services:
        limits = {key: value for key, value in each.spec.resources.items() if key != "gpu"}
        if each.gpus:
            limits["nvidia.com/gpu"] = str(each.gpus)
        elsewhere = [{"name": "GENSET_ADVERTISE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
        if hub.has_token:
            elsewhere.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": HF_SECRET, "key": "HF_TOKEN"}}})
        container = {
            "name": each.name,
            "image": each.image,
            "command": each.command,
            "env": [*_env(each.environment | hub.environment), *elsewhere],
            "ports": [{"name": "wire", "containerPort": WIRE_PORT}, STATUS_OF_CONTAINER],
            **_probes(_asks("/ready", 1)),
            "resources": {"requests": limits, "limits": limits},
        }
        documents.append(_deployment(each.name, container, each.spec.workers, hub.cache))
    return documents


def _probes(readiness: Mapping[str, Any]) -> dict[str, Any]:
    """The probes of a container: its `readiness`, and liveness by its status port. The status port responds even while a program's event
    loop is busy, but not while its modules are imported."""
    return {
        "startupProbe": _asks("/live", START_S // PERIOD_S),
        "livenessProbe": _asks("/live", 3),
        "readinessProbe": dict(readiness),
    }


def _asks(path: str, failures: int, port: str = "status") -> dict[str, Any]:
    get = {"path": path, "port": port}
    return {"httpGet": get, "periodSeconds": PERIOD_S, "timeoutSeconds": TIMEOUT_S, "failureThreshold": failures}


def _env(values: Mapping[str, str]) -> list[dict[str, str]]:
    # Kubernetes reads `$(NAME)` as another variable, and `$$` as `$`.
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]


def _kubernetes_service(name: str, port: int) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": port, "targetPort": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _deployment(name: str, container: Mapping[str, Any], replicas: int = 1, claim: str = "") -> dict[str, Any]:
    labels = {"app": name}
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": GRACE_S, "containers": [dict(container)]}
    if claim:
        volume = "model-cache"
        pod["containers"][0]["volumeMounts"] = [{"name": volume, "mountPath": MODEL_CACHE}]
        pod["volumes"] = [{"name": volume, "persistentVolumeClaim": {"claimName": claim}}]
        # A new volume is root's. `OnRootMismatch` avoids walking through a full one at each start.
        pod["securityContext"] = {"fsGroup": IMAGE_USER, "fsGroupChangePolicy": "OnRootMismatch"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def to_yaml(value: Any, indent: str = "") -> str:
    """Writes plain data as block YAML. Strings are quoted as in JSON, which YAML reads too."""
    if isinstance(value, Mapping) and value:
        return "".join(f"{indent}{key}:{_nested(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{indent}-{_nested(item, indent)}" for item in value)
    return f"{indent}{json.dumps(value)}\n"


def _nested(value: Any, indent: str) -> str:
    if isinstance(value, Mapping | list) and value:
        return "\n" + to_yaml(value, indent + "  ")
    return f" {json.dumps(value)}\n"


if __name__ == "__main__":
    sys.exit(main())
