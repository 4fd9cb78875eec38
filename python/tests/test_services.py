"""Declarations of services, their configuration and manifests, without the native module."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from genset import _service, deploy, sdk, serve
from genset.dynamo import sdk as dynamo
from genset.sdk import ServiceSpec, depends, endpoint, on_shutdown, on_start, parse_bytes, parse_gpus, service


@pytest.mark.parametrize("memory", ["20 Gi", "lots", "-1", "nan", "0", "20GiB", ""])
def test_memory_that_is_none_is_refused_where_it_is_declared(memory: str) -> None:
    with pytest.raises(ValueError, match=f"memory: '{memory}' is no memory, such as 20Gi, 512M or a number of bytes"):
        service(resources={"memory": memory})


@pytest.mark.parametrize("gpu", ["0.5", "-1", "one", "1e3", ""])
def test_devices_come_whole(gpu: str) -> None:
    with pytest.raises(ValueError, match=f"gpu: '{gpu}' is no whole number of devices"):
        service(resources={"gpu": gpu})


def test_devices_are_those_that_cuda_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, devices in (("0, 2,", ["0", "2"]), ("", []), ("-1", []), ("1,-1,2", ["1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert serve._devices() == devices
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("shutil.which", lambda name: name)
    listed = subprocess.CompletedProcess([], 0, "GPU 0: A (UUID: a)\n  MIG 1g.10gb Device 0: (UUID: b)\nGPU 1: A (UUID: c)\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: listed)
    assert serve._devices() == ["0", "1"]


def test_amounts_are_read() -> None:
    service(resources={"gpu": 2, "memory": 1 << 30, "cpu": 0.5})
    assert [parse_bytes(text) for text in ("20Gi", "1.5k", "512M", "7")] == [20 << 30, 1500, 512_000_000, 7]
    assert [parse_gpus(text) for text in ("0", "2", "2.0")] == [0, 2, 2]


@service(image="mine:1")
class Quoting:
    @endpoint()
    async def generate(self, request: Any) -> Any:
        return request


def test_a_setting_with_a_dollar_is_the_same_in_a_container() -> None:
    told = {"template": "$(HOME) costs $5"}
    deployed = deploy._Deployed(ServiceSpec.of(Quoting), "m:Quoting", None, told)
    written = deploy.compose([deployed], None)["services"]["quoting"]["environment"][serve.CONFIG_VARIABLE]
    (container,) = deploy.kubernetes([deployed], None)[-1]["spec"]["template"]["spec"]["containers"]
    assert {"name": serve.CONFIG_VARIABLE, "value": written} in container["env"]
    assert written == '{"template": "$$(HOME) costs $$5"}'


def test_an_endpoint_is_one_method() -> None:
    with pytest.raises(TypeError, match="Double: first and second are both the endpoint answer: give one another name"):

        @service()
        class Double:
            @endpoint(name="answer")
            async def first(self, request: Any) -> Any:
                return request

            @endpoint(name="answer")
            async def second(self, request: Any) -> Any:
                return request

    @service()
    class Again(Quoting):
        @endpoint()
        async def generate(self, request: Any) -> Any:
            return [request]

        other_name = generate

    assert list(ServiceSpec.of(Again).endpoints) == ["generate"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda it: staticmethod(endpoint()(it)),
        lambda it: endpoint()(cast(Any, staticmethod(it))),
        lambda it: on_start(cast(Any, classmethod(it))),
    ],
)
def test_what_is_no_method_of_an_instance_is_refused(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="A.it is a (static|class)method: endpoints and hooks are methods of an instance"):
        service()(type("A", (), {"it": wrap(lambda request: request)}))


@pytest.mark.parametrize("given", [{"name": "a.b"}, {"namespace": "a b"}, {"name": "Gr\u00f6\u00dfe"}, {"name": "a" * 64}, {"name": 3}])
def test_a_name_that_no_endpoint_can_have_is_refused_where_it_is_declared(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="A: .* is no part of a name: use 1 to 63 letters, digits, - and _"):
        service(**given)(type("A", (), {}))


def test_a_decorator_without_its_brackets_is_refused() -> None:
    for decorator in (service, dynamo.service):
        with pytest.raises(TypeError, match=r"write @service\(\), with brackets"):
            cast(Any, decorator)(int)


def test_a_hook_with_brackets_is_refused() -> None:
    for hook, name in ((on_start, "on_start"), (on_shutdown, "on_shutdown")):
        with pytest.raises(TypeError, match=f"write @{name}, without brackets"):
            hook()


@pytest.mark.parametrize("workers", [0, 1.5, "2"])
def test_a_number_of_processes_is_checked_where_it_is_declared(workers: Any) -> None:
    with pytest.raises(ValueError, match="is no number of processes, at least 1"):
        service(workers=workers)


def test_a_dependency_is_a_class() -> None:
    with pytest.raises(TypeError, match="'Back' is no service: decorate the class"):
        depends(cast(Any, "Back"))


def test_a_service_without_an_endpoint_is_not_served() -> None:
    with pytest.raises(serve.UsageError, match="A has no endpoint: decorate a method with @endpoint()"):
        serve.adjusted([ServiceSpec.of(service()(type("A", (), {})))], {})


@service(workers=3, resources={"memory": "1Gi", "gpu": 1}, image="mine:1")
class Sized:
    @endpoint()
    async def generate(self, request: Any) -> Any:
        return request


def test_a_lower_limit_of_memory_than_the_declared_one_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits = [(1 << 20, 1 << 29)]

    def setrlimit(kind: int, wanted: tuple[int, int]) -> None:
        # As for a process without rights.
        if wanted[1] > limits[-1][1]:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.delenv(serve.CORES_VARIABLE, raising=False)
    _service.limit(ServiceSpec.of(Sized))
    assert limits[-1] == (1 << 29, 1 << 29)
    assert f"Sized: of its memory, 1Gi, this process may have {1 << 29} bytes" in caplog.text


def test_a_configuration_says_how_many_workers_there_are_and_what_each_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    file = tmp_path / "sized.json"
    file.write_text('{"Sized": {"ServiceArgs": {"workers": 1, "resources": {"gpu": "2"}}}}')
    settings = ["--Sized.ServiceArgs.workers=2", "--Sized.a.b=7"]
    told = serve.configuration(str(file), settings, ["Sized"])
    assert told == {"Sized": {"ServiceArgs": {"workers": 2, "resources": {"gpu": "2"}}, "a.b": 7}}
    planned = serve.plan(ServiceSpec.of(Sized), told, "m:Sized")
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in planned] == ["0,1", "2,3"]
    (adjusted,) = serve.adjusted([ServiceSpec.of(Sized)], told)
    assert (adjusted.workers, adjusted.resources) == (2, {"memory": "1Gi", "gpu": "2"})
    for setting, problem in [
        ("workers=0", "Sized: ServiceArgs.workers: 0 is no number of processes"),
        ("workers=many", "Sized: ServiceArgs.workers: 'many' is no number of processes"),
        ("resources.memory=lots", "Sized: ServiceArgs.resources: memory: 'lots' is no memory"),
        ("resources.tpu=1", "Sized: ServiceArgs.resources knows cpu, memory and gpu, not tpu"),
        ("resources=1", "Sized: ServiceArgs.resources: 1 is no map"),
        ("envs=1", "Sized: ServiceArgs knows workers and resources, not envs"),
    ]:
        wrong = serve.configuration(None, [f"--Sized.ServiceArgs.{setting}"], ["Sized"])
        with pytest.raises(serve.UsageError, match=problem):
            serve.plan(ServiceSpec.of(Sized), wrong, "m:Sized")


def test_each_process_has_a_wire_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"Sized": {"ServiceArgs": {"workers": 2, "resources": {"gpu": 0}}}}

    def ports() -> list[str | None]:
        return [each.environment.get("GENSET_WIRE_PORT") for each in serve.plan(ServiceSpec.of(Sized), told, "m:Sized")]

    for given, expected in [("", [None, None]), ("0", ["0", "0"]), ("7480", ["7480", "7481"])]:
        monkeypatch.setenv("GENSET_WIRE_PORT", given)
        assert ports() == expected
    monkeypatch.setenv("GENSET_WIRE_PORT", "65535")
    with pytest.raises(serve.UsageError, match="GENSET_WIRE_PORT 65535: each of the 2 processes needs one"):
        ports()


def test_a_worker_count_or_resource_without_a_value_is_not_given(tmp_path: Path) -> None:
    file = tmp_path / "sized.json"
    declared = ServiceSpec.of(Sized)
    for given in ('{"workers": null, "resources": null}', '{"resources": {"gpu": null, "memory": null}}'):
        file.write_text(f'{{"Sized": {{"ServiceArgs": {given}}}}}')
        (adjusted,) = serve.adjusted([declared], serve.configuration(str(file), [], ["Sized"]))
        assert adjusted == declared
    file.write_text('{"Sized": {"ServiceArgs": {"envs": null}}}')
    with pytest.raises(serve.UsageError, match="Sized: ServiceArgs knows workers and resources, not envs"):
        serve.adjusted([declared], serve.configuration(str(file), [], ["Sized"]))


def test_services_share_settings_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    common = '"Common": {"model": "m", "block-size": 64, "other": 1}'
    file.write_text(f'{{{common}, "Sized": {{"common-configs": ["model", "block-size"], "block-size": 16}}}}')
    assert serve.configuration(str(file), [], ["Sized"]) == {"Sized": {"model": "m", "block-size": 16}}
    file.write_text('{"Sized": {"common-configs": null, "ServiceArgs": null}}')
    told = serve.configuration(str(file), ["--Sized.ServiceArgs.workers=2"], ["Sized"])
    assert told == {"Sized": {"ServiceArgs": {"workers": 2}}}
    for wanted in ('["modle"]', '"model"', "[[]]"):
        file.write_text(f'{{{common}, "Sized": {{"common-configs": {wanted}}}}}')
        with pytest.raises(serve.UsageError, match="Sized: common-configs: .* is no list of keys of Common, which are model, block-size, other"):
            serve.configuration(str(file), [], ["Sized"])


def test_a_setting_is_one_service_s_also_if_the_file_shares_it(tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    wants = '{"common-configs": ["ServiceArgs"]}'
    file.write_text(f'{{"Common": {{"ServiceArgs": {{"resources": {{"gpu": 1}}}}}}, "Sized": {wants}, "Quoting": {wants}}}')
    told = serve.configuration(str(file), ["--Sized.ServiceArgs.resources.gpu=2"], ["Sized", "Quoting"])
    assert [told[name]["ServiceArgs"]["resources"]["gpu"] for name in ("Sized", "Quoting")] == [2, 1]


def test_an_alias_of_yaml_has_the_shared_settings_too(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "shared.yaml"
    file.write_text("Common: {model: m}\nSized: &sized {common-configs: [model]}\nQuoting: *sized\n")
    told = serve.configuration(str(file), ["--Sized.end=!"], ["Sized", "Quoting"])
    assert told == {"Sized": {"model": "m", "end": "!"}, "Quoting": {"model": "m"}}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("broken.json", b"{", "Expecting property name"),
        ("broken.yaml", b"Quoting: {model", "line 1, column 16: expected ',' or '}', but got '<stream end>'"),
        ("control.yaml", b"Quoting: \0", "unacceptable character"),
        ("no_date.yaml", b"Quoting: {day: 2026-13-01}", "month must be in 1..12"),
        ("date.yaml", b"Quoting: {day: 2026-01-01}", "Object of type date is not JSON serializable"),
        ("broken.yml", b"\xff\xfe", "is no text: 'utf-8' codec can't decode"),
        ("list.json", b"[]", "must map names of services to their settings"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(serve.UsageError, match=problem) as error:
        serve.configuration(str(tmp_path / name), [], ["Quoting"])
    assert str(error.value).startswith(f"{tmp_path / name}: ")
    assert "\n" not in str(error.value)


def test_a_service_without_settings_in_a_file_has_none(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"Quoting": null}')
    assert serve.configuration(str(file), [], ["Quoting"]) == {"Quoting": {}}
    assert serve.configuration(str(file), ["--Quoting.end=!"], ["Quoting"]) == {"Quoting": {"end": "!"}}


@pytest.mark.parametrize(("tells", "code"), [(False, 1), (True, 0)])
def test_a_long_life_begins_when_a_service_has_started(
    tells: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every life counts as long here. The seventh, if there is one, stops the supervisor.
    (tmp_path / "dying.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom genset._service import tell_started\n"
        f"if {tells}:\n    tell_started()\n"
        "lives = len(list(Path('.').glob('life*')))\nPath(f'life{lives}').touch()\n"
        "if lives == 6:\n    os.kill(os.getppid(), signal.SIGTERM)\nraise SystemExit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(serve.__file__).parents[1]))
    monkeypatch.setattr(serve, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(serve, "LONG_LIFE_S", -1.0)
    process = serve.Process(ServiceSpec.of(Quoting), "dying", {})
    assert asyncio.run(serve.Supervisor("dying:Dying", [process]).run()) == code
    assert len(list(tmp_path.glob("life*"))) == (7 if tells else serve.MAX_DEATHS)


def test_what_does_not_end_after_its_drain_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "staying.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(serve.__file__).parents[1]))
    monkeypatch.setattr(serve, "KILL_S", 0.0)
    process = serve.Process(ServiceSpec.of(Quoting), "staying", {})
    assert asyncio.run(asyncio.wait_for(serve.Supervisor("staying:Staying", [process]).run(), 60)) == 0
    assert "not over after 0 s: killing all" in capsys.readouterr().out


def test_a_service_drains_after_those_that_depend_on_it() -> None:
    @service()
    class Front:
        back = depends(Quoting)

        @endpoint()
        async def generate(self, request: Any) -> Any: ...

    told: list[str] = []

    class Running:
        def __init__(self, title: str) -> None:
            self.title = title

        def get_returncode(self) -> None:
            return None

        def terminate(self) -> None:
            told.append(self.title)

    async def test() -> None:
        processes = [serve.Process(spec, spec.name, {}) for spec in ServiceSpec.of(Front).graph()]
        supervisor = serve.Supervisor("graph:Front", processes)
        supervisor._running = {each.title: (each, cast(Any, Running(each.title))) for each in processes}
        supervisor._stop()
        assert told == ["Front"]
        del supervisor._running["Front"]
        supervisor._drain_unneeded()
        supervisor._drain_unneeded()
        assert told == ["Front", "Quoting"]

    asyncio.run(test())


def test_each_method_of_on_shutdown_is_called_also_after_one_that_failed() -> None:
    called: list[str] = []

    class Closing:
        @on_shutdown
        def first(self) -> None:
            called.append("first")
            raise OSError("first failed")

        @on_shutdown
        async def second(self) -> None:
            called.append("second")

    with pytest.raises(OSError, match="first failed"):
        asyncio.run(sdk._call_hooks(Closing(), "shutdown"))
    assert called == ["first", "second"]


def test_a_module_that_fails_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failing.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert serve.main(["failing:Any", "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown and shown.endswith("error: failing:Any: the module cannot be imported\n")
