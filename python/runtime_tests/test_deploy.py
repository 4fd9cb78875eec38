"""`genset deploy`: the manifests of all targets agree, and what they describe runs.

No container is started: each becomes a process with the container's command and environment. Host names and ports of the containers'
network are replaced by this machine's.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import LONG_S, Program, run
from test_status import until_status

from genset import deploy, sdk
from genset.runtime import FINISH_S, GRACE_S


def documents(target: str, folder: Path, *flags: str) -> list[Any]:
    """The manifests that `genset deploy` writes for the example."""
    arguments = ["graph:Frontend", "--target", target, "--out", str(folder), "--image", "mine:1", "--Frontend.model=deployed"]
    assert deploy.main([*arguments, *flags]) == 0
    (file,) = folder.iterdir()
    return list(yaml.safe_load_all(file.read_text()))


def test_both_manifests_say_the_same(in_graph: None, tmp_path: Path) -> None:
    services = documents("compose", tmp_path / "compose")[0]["services"]
    manifests = documents("kubernetes", tmp_path / "kubernetes")
    deployments = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Deployment"}
    assert set(services) == set(deployments) == {"etcd", "http", "prefill", "backend", "frontend"}
    for name, service in services.items():
        spec = deployments[name]
        (container,) = spec["template"]["spec"]["containers"]
        assert (container["image"], container["command"]) == (service["image"], service["command"])
        assert spec["replicas"] == service.get("deploy", {}).get("replicas", 1)
        given = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
        assert given == service.get("environment", {})
        if service["image"] != deploy.ETCD_IMAGE:
            seconds = spec["template"]["spec"]["terminationGracePeriodSeconds"]
            assert service["stop_grace_period"] == f"{seconds}s", name
            assert seconds > GRACE_S + FINISH_S, name
    for name in set(services) - {"etcd"}:
        (container,) = deployments[name]["template"]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        given = services[name]["environment"]
        assert (given["GENSET_STATUS_HOST"], given["GENSET_STATUS_PORT"]) == ("0.0.0.0", str(ports["status"])), name
        probes = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
        live, ready = {"path": "/live", "port": "status"}, {"path": "/ready", "port": "status"}
        if name == "http":
            # The models that the graph's `on_start` registers are unknown here.
            ready = {"path": "/live", "port": "http"}
            # From SIGTERM on it refuses requests, and the Service sends some for a while.
            assert container["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "10"]}}}
        assert probes == {"startup": live, "liveness": live, "readiness": ready}, name
        asked = services[name]["healthcheck"]["test"]
        assert asked[0] == "CMD" and f"http://127.0.0.1:{ports[ready['port']]}{ready['path']}" in asked[-1], name
    assert services["backend"]["deploy"]["replicas"] == 2
    assert services["backend"]["command"][-2:] == ["graph:Frontend", "Backend"]
    exposed = {each["metadata"]["name"] for each in manifests if each["kind"] == "Service"}
    assert exposed == {"etcd", "http"}


def test_services_share_a_cache_of_models_and_get_the_token(in_graph: None, tmp_path: Path) -> None:
    flags = ["--model-cache", "models", "--hf-token"]
    (composed,) = documents("compose", tmp_path / "compose", *flags)
    manifests = documents("kubernetes", tmp_path / "kubernetes", *flags)
    pods = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in manifests if each["kind"] == "Deployment"}
    assert composed["volumes"] == {"models": {}}
    for name, service in composed["services"].items():
        (container,) = pods[name]["containers"]
        given = {each["name"]: each for each in container.get("env", [])}
        if name in deploy.BESIDE:
            # Containers that read no model get no token either.
            assert "volumes" not in service and "volumes" not in pods[name], name
            assert "HF_TOKEN" not in service.get("environment", {}) and "HF_TOKEN" not in given, name
            continue
        home = service["environment"]["HF_HOME"]
        assert (service["volumes"], given["HF_HOME"]["value"]) == ([f"models:{home}"], home), name
        # No file contains the token itself.
        assert service["environment"]["HF_TOKEN"] is None, name
        assert given["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hf-token", "key": "HF_TOKEN"}}, name
        (volume,), (mount,) = pods[name]["volumes"], container["volumeMounts"]
        assert volume["persistentVolumeClaim"] == {"claimName": "models"}, name
        assert mount == {"name": volume["name"], "mountPath": home}, name
        assert pods[name]["securityContext"]["fsGroup"] == deploy.IMAGE_USER, name


@pytest.mark.parametrize("name", ["/srv/models", "Models", "", "models-"])
def test_a_cache_of_models_has_a_name(name: str, in_graph: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["graph:Frontend", "--target", "kubernetes", "--out", str(tmp_path / "out"), "--image", "mine:1"]
    assert deploy.main([*arguments, f"--model-cache={name}"]) == 2
    assert f"error: --model-cache {name}: must be a name in lower case" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_is_told_in_one_line(in_graph: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    (folder / "compose.yaml").mkdir(parents=True)
    for out in (file, folder):
        assert deploy.main(["graph:Frontend", "--target", "compose", "--out", str(out), "--image", "mine:1"]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {out}: ") and told.count("\n") == 1, told
    assert [each.name for each in folder.iterdir()] == ["compose.yaml"]


@sdk.service(namespace="demo", image="mine:1")
class Offers:
    @sdk.endpoint(model="offered")
    async def chat(self, body: Any) -> str:
        return "hello"


def test_a_frontend_is_ready_with_the_first_model_of_a_graph_that_offers_one() -> None:
    services = [deploy._Deployed(sdk.ServiceSpec.of(Offers), "offers:Offers", None, {})]
    asked = deploy.compose(services, "mine:1")["services"]["http"]["healthcheck"]
    assert f":{deploy.HTTP_PORT}/ready" in asked["test"][-1] and asked["retries"] == 2
    (http,) = [each for each in deploy.kubernetes(services, "mine:1") if each["metadata"]["name"] == "http" and each["kind"] == "Deployment"]
    probe = http["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
    assert (probe["httpGet"], probe["failureThreshold"]) == ({"path": "/ready", "port": "http"}, 2)


def test_a_flag_wins_over_the_environment_s_image_and_a_service_s_own_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images.py").write_text(
        "from genset.sdk import IMAGE, depends, endpoint, service\n\n"
        "@service(image='own:1')\nclass Own:\n    @endpoint()\n    async def generate(self, request): ...\n\n"
        "@service(image=IMAGE)\nclass Said:\n    own = depends(Own)\n    @endpoint()\n    async def generate(self, request): ...\n\n"
        "@service()\nclass Silent:\n    said = depends(Said)\n    @endpoint()\n    async def generate(self, request): ...\n"
    )

    def images(*flags: str, **given: str) -> list[str]:
        words = [sys.executable, "-m", "genset.deploy", "images:Silent", "--target", "compose", "--out", str(tmp_path), *flags]
        environment = {**{key: value for key, value in os.environ.items() if not key.endswith("_IMAGE")}, **given}
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=LONG_S)
        services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
        return [services[name]["image"] for name in ("own", "said", "silent", "http")]

    assert images("--image", "flag:1", GENSET_IMAGE="mine:1") == ["own:1", "flag:1", "flag:1", "flag:1"]
    assert images(GENSET_IMAGE="mine:1", DYNAMO_IMAGE="theirs:1") == ["own:1", "mine:1", "mine:1", "mine:1"]
    assert images("--image", "flag:1") == ["own:1", "flag:1", "flag:1", "flag:1"]


def test_parts_of_a_core_are_written_as_each_target_reads_them() -> None:
    @sdk.service(image="mine:1", resources={"cpu": "1500m"})
    class Parts:
        @sdk.endpoint()
        async def generate(self, request: Any) -> None: ...

    services = [deploy._Deployed(sdk.ServiceSpec.of(Parts), "parts:Parts", None, {})]
    assert deploy.compose(services, "mine:1")["services"]["parts"]["deploy"]["resources"]["limits"] == {"cpus": "1.5"}
    container = deploy.kubernetes(services, "mine:1")[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "1500m"}


def test_each_container_of_compose_has_devices_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "devices.py").write_text(
        "from genset.sdk import depends, endpoint, service\n\n"
        "@service(workers=2)\nclass Plain:\n    @endpoint()\n    async def generate(self, request): ...\n\n"
        "@service(resources={'gpu': 2}, workers=2)\nclass Large:\n    plain = depends(Plain)\n\n"
        "    @endpoint()\n    async def generate(self, request): ...\n\n"
        "@service(resources={'gpu': 1})\nclass Small:\n    large = depends(Large)\n\n"
        "    @endpoint()\n    async def generate(self, request): ...\n\n"
        "@service(name='large-1')\nclass Other:\n    small = depends(Small)\n\n"
        "    @endpoint()\n    async def generate(self, request): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["devices:Small", "--out", "out", "--image", "mine:1", "--target"]
    assert deploy.main([*arguments, "compose"]) == deploy.main([*arguments, "kubernetes"]) == 0
    services = yaml.safe_load((tmp_path / "out/compose.yaml").read_text())["services"]
    given = {
        name: (service["deploy"]["replicas"], service["deploy"]["resources"].get("reservations"))
        for name, service in services.items()
        if name not in deploy.BESIDE
    }

    def devices(*ids: str) -> dict[str, Any]:
        return {"devices": [{"driver": "nvidia", "device_ids": list(ids), "capabilities": ["gpu"]}]}

    assert given == {
        "plain": (2, None),
        "large-0": (1, devices("0", "1")),
        "large-1": (1, devices("2", "3")),
        "small": (1, devices("4")),
    }
    assert {name: services[name]["depends_on"] for name in given} == {
        "plain": ["etcd"],
        "large-0": ["etcd", "plain"],
        "large-1": ["etcd", "plain"],
        "small": ["etcd", "large-0", "large-1"],
    }
    assert services["large-1"]["command"][-1] == "Large"
    # In Kubernetes each pod gets a number of devices.
    manifests = yaml.safe_load_all((tmp_path / "out/graph.yaml").read_text())
    (large,) = [each["spec"] for each in manifests if each["kind"] == "Deployment" and each["metadata"]["name"] == "large"]
    assert large["replicas"] == 2
    assert large["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}

    capsys.readouterr()
    arguments[0] = "devices:Other"
    assert deploy.main([*arguments, "kubernetes"]) == 0
    assert deploy.main([*arguments, "compose"]) == 2
    assert "the service Other and the service Large are both called large-1" in capsys.readouterr().err


class Containers:
    """The services of a compose file, as processes."""

    def __init__(self, services: dict[str, Any], folder: Path) -> None:
        self._services = services
        self._folder = folder
        self._etcd = free_port()
        self.running: dict[str, list[Program]] = {}
        # What `hostname -i` prints in a container.
        (folder / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
        (folder / "hostname").chmod(0o755)

    def start(self, name: str) -> list[Program]:
        """Starts all replicas of a service."""
        service = self._services[name]
        command = [self._here(word) for word in [*service.get("entrypoint", []), *service["command"]]]
        # The image has `python` and `genset` in its PATH.
        paths = [str(self._folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        environment = {**os.environ, "PATH": os.pathsep.join(paths)}
        environment.update({key: self._here(value) for key, value in service.get("environment", {}).items()})
        replicas = service.get("deploy", {}).get("replicas", 1)
        # A program's name is looked up in the container's PATH.
        command[0] = shutil.which(command[0], path=environment["PATH"]) or command[0]
        self.running[name] = [Program(*command, environment=environment) for _ in range(replicas)]
        return self.running[name]

    def _here(self, text: str) -> str:
        for there, here in [
            ("$$", "$"),
            ("/usr/local/bin/etcd", shutil.which("etcd") or "etcd"),
            ("://etcd:2379", f"://127.0.0.1:{self._etcd}"),
            ("://0.0.0.0:2379", f"://127.0.0.1:{self._etcd}"),
            (f"--http-port={deploy.HTTP_PORT}", "--http-port=0"),
        ]:
            text = text.replace(there, here)
        return "0" if text in (str(deploy.WIRE_PORT), str(deploy.STATUS_PORT)) else text

    def check(self, name: str, port: int) -> int:
        """Runs a service's health check in one of its containers; returns the exit code."""
        _, *command = self._services[name]["healthcheck"]["test"]
        command[0] = sys.executable
        command[-1] = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", command[-1])
        return subprocess.run(command, capture_output=True, check=False).returncode

    def wait_for_etcd(self) -> None:
        end = time.monotonic() + LONG_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._etcd}/health", timeout=5)
                return
            except OSError:
                assert time.monotonic() < end and self.running["etcd"][0].process.poll() is None
                time.sleep(0.05)


def status_port(program: Program) -> int:
    """The status port that a program logs."""
    return int(program.wait_for("status on http://0.0.0.0:").rsplit(":", 1)[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def containers(in_graph: None, tmp_path: Path) -> Iterator[Containers]:
    services = documents("compose", tmp_path / "out")[0]["services"]
    # Does not collide with another etcd, and is removed with the test.
    services["etcd"]["command"] += ["--listen-peer-urls=http://127.0.0.1:0", f"--data-dir={tmp_path / 'etcd'}"]
    made = Containers(services, tmp_path)
    yield made
    for programs in made.running.values():
        for program in programs:
            if program.process.poll() is None:
                program.process.kill()
                program.exit_code()


def test_what_is_deployed_serves_loses_a_member_and_drains(containers: Containers) -> None:
    openai = pytest.importorskip("openai")
    containers.start("etcd")
    containers.wait_for_etcd()
    (http,) = containers.start("http")
    status = {"http": [status_port(http)]}
    line = next((line for line in http.lines if "http://" in line and "status on" not in line), None) or http.wait_for("http://")
    port = re.search(r"http://[\w.]+:(\d+)", line)
    assert port is not None, line
    # A model is not required.
    assert containers.check("http", int(port[1])) == 0
    for name in ("prefill", "backend", "frontend"):
        started = containers.start(name)
        status[name] = [status_port(program) for program in started]
        for program in started:
            program.wait_for("served by" if name != "frontend" else "serves the model deployed")

    async def main() -> None:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port[1]}/v1", api_key="none", max_retries=0)

        async def say() -> str:
            messages = [{"role": "user", "content": "one two three"}]
            answer = await client.chat.completions.create(model="deployed", messages=messages)
            return str(answer.choices[0].message.content)

        while "deployed" not in [each.id async for each in client.models.list()]:
            await asyncio.sleep(0.05)
        for name, ports in status.items():
            for each in ports:
                await until_status(each, 200)
                asked = int(port[1]) if name == "http" else each
                assert await asyncio.to_thread(containers.check, name, asked) == 0
        assert [await say() for _ in range(3)] == ["three two one"] * 3
        first, _ = containers.running["backend"]
        first.stop(signal.SIGKILL)
        # The other one answers: a request that finds the dead one's address is sent again, to the other.
        assert [await say() for _ in range(4)] == ["three two one"] * 4
        await client.close()

    run(main())
    for name in ("frontend", "backend", "prefill", "http"):
        codes = [program.stop() for program in containers.running[name] if program.process.poll() is None]
        assert codes == [0], (name, containers.running[name][-1].lines)
