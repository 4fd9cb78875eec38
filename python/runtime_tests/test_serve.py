"""`genset serve` and `genset deploy`, on the graph of examples/python/graph."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LONG_S, Program, run, until
from test_llm import ask, frontend
from test_status import until_status

from genset import deploy, serve
from genset._service import limit
from genset.backend import find_binary
from genset.runtime import Runtime
from genset.sdk import parse_bytes


def test_a_graph_serves_loses_a_member_and_drains(in_graph: None, start_genset: Callable[..., Program]) -> None:
    openai = pytest.importorskip("openai")
    address = frontend(start_genset)
    graph = start_genset("serve", "graph:Frontend", "-f", "config.json", "--Frontend.model=reversed")
    graph.wait_for_all(*["graph.Backend.generate: served by"] * 2, "serves the model reversed")

    async def main() -> None:
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

        async def say(**options: object) -> str:
            messages = [{"role": "user", "content": "one two three"}]
            answer = await client.chat.completions.create(model="reversed", messages=messages, **options)
            assert answer.usage.total_tokens == 3 + answer.usage.completion_tokens
            return str(answer.choices[0].message.content)

        while "reversed" not in [each.id async for each in client.models.list()]:
            await asyncio.sleep(0.05)
        assert [await say() for _ in range(3)] == ["three two one"] * 3
        assert await say(max_tokens=2) == "three two"

        # A process dies: the other one answers, and the dead one is restarted.
        async with await Runtime.connect() as runtime:
            backends = await runtime.endpoint("graph.Backend.generate").client()
            # The client sees them one after the other.
            while len(backends.instance_ids()) < 2:
                await asyncio.sleep(0.05)
            before = set(backends.instance_ids())
            os.kill(member(graph, "graph:Frontend", "Backend"), signal.SIGKILL)
            graph.wait_for("ended with -9; starting it again in 0.5 s")
            while not (len(backends.instance_ids()) == 2 and set(backends.instance_ids()) != before):
                await asyncio.sleep(0.05)
        assert [await say() for _ in range(3)] == ["three two one"] * 3
        await client.close()

    run(main())
    assert graph.stop() == 0
    assert any("draining all" in line for line in graph.lines)


def member(graph: Program, target: str, name: str) -> int:
    """The process of a service: a child of the supervisor."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = int(re.search(r"PPid:\s+(\d+)", (folder / "status").read_text())[1])  # type: ignore[index]
            except OSError:
                continue
            if words[-3:-1] == [target, name] and parent == graph.process.pid:
                return int(folder.name)
    raise AssertionError(f"no process of {name}")


def test_a_service_that_dies_at_once_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(
        "from genset.sdk import endpoint, service\n\n@service()\nclass Broken:\n    def __init__(self):\n"
        "        raise RuntimeError('no weights')\n\n    @endpoint()\n    async def generate(self, request): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "FIRST_PAUSE_S", 0.01)
    assert serve.main(["broken:Broken"]) == 1
    shown = capfd.readouterr().out
    assert shown.count("starting it again") == 4 and "giving up. Its last lines" in shown
    assert "no weights" in shown.split("giving up", 1)[1]


def test_children_end_with_their_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_genset: Callable[..., Program]) -> None:
    # The child holds the service's output open, as an engine in its own process does. The service ignores a drain.
    (tmp_path / "holder.py").write_text(
        "import subprocess\nimport time\n\nfrom genset.sdk import endpoint, on_shutdown, service\n\n@service()\nclass Holder:\n"
        "    def __init__(self):\n        print('its child is', subprocess.Popen(['sleep', '600']).pid, flush=True)\n\n"
        "    @on_shutdown\n    def linger(self):\n        time.sleep(600)\n\n"
        "    @endpoint()\n    async def generate(self, request): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    serving = start_genset("serve", "holder:Holder")

    def child() -> int:
        return int(serving.wait_for("its child is").split()[-1])

    first = child()
    os.kill(member(serving, "holder:Holder", "Holder"), signal.SIGKILL)
    serving.wait_for("ended with -9; starting it again")
    run(until(lambda: not is_sleep(first), "the child of the service that died is killed"))
    second = child()
    serving.process.send_signal(signal.SIGTERM)
    serving.wait_for("draining all")
    assert serving.stop() == 0
    assert any("killing all" in line for line in serving.lines)
    run(until(lambda: not is_sleep(second), "the child of the service that was killed is killed"))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_services_end_with_their_supervisor(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_genset: Callable[..., Program]
) -> None:
    (tmp_path / "closer.py").write_text(
        "from pathlib import Path\n\nfrom genset.sdk import endpoint, on_shutdown, service\n\n@service()\nclass Closer:\n"
        "    @on_shutdown\n    def note(self):\n        Path('closed').touch()\n\n"
        "    @endpoint()\n    async def generate(self, request): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    serving = start_genset("serve", "closer:Closer")
    serving.wait_for("served by")
    service = Path(f"/proc/{member(serving, 'closer:Closer', 'Closer')}/cmdline")
    serving.process.send_signal(number)

    def is_gone() -> bool:
        try:
            return service.read_bytes() == b""
        except OSError:
            return True

    run(until(is_gone, "the service ends"))
    assert Path("closed").exists()
    assert serving.process.wait(LONG_S) == (0 if number is signal.SIGHUP else -signal.SIGKILL)


def test_a_second_sighup_does_not_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_genset: Callable[..., Program]) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n\nfrom genset.sdk import endpoint, on_shutdown, service\n\n@service()\nclass Slow:\n"
        "    @on_shutdown\n    def linger(self):\n        print('it lingers', flush=True)\n"
        "        while not Path('go').exists():\n            time.sleep(0.01)\n        Path('closed').touch()\n\n"
        "    @endpoint()\n    async def generate(self, request): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    serving = start_genset("serve", "slow:Slow")
    serving.wait_for("served by")
    serving.process.send_signal(signal.SIGHUP)
    serving.wait_for("it lingers")
    serving.process.send_signal(signal.SIGHUP)
    Path("go").touch()
    assert serving.exit_code() == 0
    assert Path("closed").exists() and not any("killing all" in line for line in serving.lines)


def test_services_drain_where_nobody_reads_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talker.py").write_text(
        "from pathlib import Path\n\nfrom genset.sdk import endpoint, on_shutdown, on_start, service\n\n@service()\nclass Talker:\n"
        "    @on_start\n    def begin(self):\n        print('it begins', flush=True)\n\n"
        "    @on_shutdown\n    def note(self):\n        print('it ends', flush=True)\n        Path('closed').touch()\n\n"
        "    @endpoint()\n    async def generate(self, request): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    terminal, end = os.openpty()
    serving = subprocess.Popen([find_binary(), "serve", "talker:Talker"], stdin=end, stdout=end, stderr=end)
    try:
        os.close(end)
        with open(terminal, errors="replace") as lines:
            assert any("it begins" in line for line in lines)
        # Closes the terminal.
        serving.send_signal(signal.SIGHUP)
        serving.wait(LONG_S)
    finally:
        serving.kill()
        serving.wait()
    assert Path("closed").exists()


def is_sleep(process: int) -> bool:
    """Whether a process is a running `sleep`. A dead one that is not reaped yet has no command line."""
    try:
        return b"sleep" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def test_what_cannot_be_served_is_named(in_graph: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert serve.main(arguments) == 2
        return capsys.readouterr().err

    for target in ("graph", "graph:", ":Frontend", "./graph:Frontend"):
        assert f"error: {target!r} names no class: write MODULE:CLASS" in error(target)
    assert "is it in this folder" in error("no_such:Class")
    assert "has no class Other" in error("graph:Other")
    assert "decorate the class" in error("graph:Prompt")
    assert "write --Service.key=value" in error("graph:Frontend", "--model=x")
    assert "names Other, which is none of the services Prefill, Backend, Frontend" in error("graph:Frontend", "--Other.key=1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert serve.main(["graph:Frontend", "--dry-run"]) == 0
    assert parse_bytes("20Gi") == 20 << 30 and parse_bytes("512M") == 512_000_000


def test_names_of_several_services_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = "@service(name='{}')\nclass {}:\n    {}\n    @endpoint()\n    async def generate(self, request): ...\n\n"

    def graph(module: str, first: str, second: str) -> str:
        text = service.format(first, "First", "") + service.format(second, "Second", "first = depends(First)\n")
        (tmp_path / f"{module}.py").write_text(f"from genset.sdk import depends, endpoint, service\n\n{text}")
        return f"{module}:Second"

    def errors(target: str) -> list[str]:
        codes = (serve.main([target, "--dry-run"]), deploy.main([target, "--target", "compose", "--out", "out", "--image", "mine"]))
        assert all(code in (0, 2) for code in codes)
        return [line for line in capsys.readouterr().err.splitlines() if line]

    monkeypatch.chdir(tmp_path)
    same = "error: the service Second and the service First are both called Same: give one another name with @service(name=...)"
    assert errors(graph("names_same", "Same", "Same")) == [same, same.replace("Same", "same")]
    # Deployed names are in lower case.
    assert errors(graph("names_case", "Same_a", "same-a")) == [same.replace("Same", "same-a")]
    assert errors(graph("names_taken", "Http", "Other")) == [
        "error: the service First and the frontend for HTTP are both called http: give one another name with @service(name=...)"
    ]


def test_each_process_has_a_status_port_of_its_own(
    in_graph: None, monkeypatch: pytest.MonkeyPatch, start_genset: Callable[..., Program], capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> list[str]:
        assert serve.main(["graph:Frontend", "--dry-run", *arguments]) == 0
        return re.findall(r"status port (\d+)", capsys.readouterr().out)

    assert shown() == []
    assert shown("--status-port", "9090") == ["9090", "9091", "9092", "9093"]
    monkeypatch.setenv("GENSET_STATUS_PORT", "9190")
    assert shown() == ["9190", "9191", "9192", "9193"]
    assert serve.main(["graph:Frontend", "--dry-run", "--status-port=65533"]) == 2
    assert "--status-port 65533: each of the 4 processes" in capsys.readouterr().err

    graph = start_genset("serve", "graph:Frontend", "-f", "config.json", "--status-port=0")
    ports = {int(graph.wait_for("status on http://127.0.0.1:").rsplit(":", 1)[1]) for _ in range(4)}
    assert len(ports) == 4

    async def main() -> None:
        for port in ports:
            await until_status(port, 200)

    run(main())
    assert graph.stop() == 0


def test_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from genset.sdk import ServiceSpec, endpoint, service

    @service(resources={"gpu": 2}, workers=2)
    class Large:
        @endpoint()
        async def generate(self, request: object) -> None: ...

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    planned = serve.plan(ServiceSpec.of(Large), {}, "x:Large")
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in planned] == ["4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(serve.UsageError, match="want 4 GPUs, and this machine offers 3"):
        serve.plan(ServiceSpec.of(Large), {}, "x:Large")


def test_a_service_that_names_no_gpu_keeps_those_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from genset.sdk import ServiceSpec, depends, endpoint, service

    @service(resources={"gpu": 0})
    class Hidden:
        @endpoint()
        async def generate(self, request: object) -> None: ...

    @service(resources={"gpu": 1})
    class Large:
        hidden = depends(Hidden)

        @endpoint()
        async def generate(self, request: object) -> None: ...

    @service(resources={"cpu": 1})
    class Free:
        large = depends(Large)

        @endpoint()
        async def generate(self, request: object) -> None: ...

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    planned = serve.plan(ServiceSpec.of(Free), {}, "x:Free")
    assert [each.environment.get("CUDA_VISIBLE_DEVICES") for each in planned] == ["", "4", None]
    monkeypatch.setattr(serve, "load", lambda target: ServiceSpec.of(Free))
    assert serve.main(["x:Free", "--dry-run"]) == 0
    hidden, large, free = capsys.readouterr().out.splitlines()
    assert "GPUs none" in hidden and "GPUs 4" in large and "GPUs 4,5 (all, it names none)" in free


def test_cores_are_shared_out_and_bind_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    from genset.sdk import ServiceSpec, depends, endpoint, service

    @service(resources={"cpu": "500m"}, workers=2)
    class Small:
        @endpoint()
        async def generate(self, request: object) -> None: ...

    @service(resources={"cpu": 1.5})
    class Large:
        small = depends(Small)

        @endpoint()
        async def generate(self, request: object) -> None: ...

    def planned() -> list[str]:
        return [each.environment[serve.CORES_VARIABLE] for each in serve.plan(ServiceSpec.of(Large), {}, "x:Large")]

    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 7})
    assert planned() == ["2", "3", "5,7"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5})
    assert planned() == ["2", "3", "5,2"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2})
    assert planned() == ["2", "2", "2"]

    # In a container no cores were assigned.
    monkeypatch.delenv(serve.CORES_VARIABLE, raising=False)
    limit(ServiceSpec.of(Large))
    assert bound == []
    monkeypatch.setenv(serve.CORES_VARIABLE, "5,7")
    limit(ServiceSpec.of(Large))
    assert bound == [{5, 7}]
