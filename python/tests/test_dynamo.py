"""The names that Dynamo's programs import."""

from __future__ import annotations

import asyncio
import enum
import importlib
import os
import pydoc
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest

from genset import EngineConfig, WorkerConfig, exceptions, frontend, sample_main
from genset.engine import Context
from genset.backend import BINARY_VARIABLE
from genset.runtime import Endpoint


def test_an_engine_is_imported_as_from_dynamo_s_modules() -> None:
    from genset.backend.worker import Worker
    from genset.dynamo.common.backend.engine import EngineConfig as ported_config
    from genset.dynamo.common.backend.worker import Worker as ported_worker
    from genset.dynamo.common.backend.worker import WorkerConfig as ported_worker_config

    assert (ported_config, ported_worker, ported_worker_config) == (EngineConfig, Worker, WorkerConfig)


@pytest.mark.parametrize("module", ["_core", "common.backend", "llm", "runtime", "sdk"])
def test_help_describes_the_modules(module: str) -> None:
    assert f"genset.dynamo.{module}" in pydoc.plain(pydoc.render_doc(importlib.import_module(f"genset.dynamo.{module}")))


def test_a_module_of_dynamo_s_that_is_not_here_says_what_to_use(tmp_path: Path) -> None:
    from genset.dynamo import common, frontend as ported_frontend
    from genset.dynamo.common.backend import sample_main as ported_sample

    assert common and callable(ported_frontend.main) and ported_sample.main is sample_main.main
    for name, problem in [
        ("genset.dynamo.vllm", "out=vllm MODEL"),
        ("genset.dynamo.vllm.main", "out=vllm MODEL"),
        ("genset.dynamo.planner", "genset top"),
        ("genset.dynamo.of_tomorrow", "coming-from-dynamo.md"),
        ("genset.dynamo.common.of_tomorrow", "coming-from-dynamo.md"),
    ]:
        with pytest.raises(ModuleNotFoundError, match=f"there is no genset.dynamo.*: .*{problem}"):
            importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'genset.of_tomorrow'$"):
        importlib.import_module("genset.of_tomorrow")
    with pytest.raises(ImportError, match="genset.dynamo has no vllm: .*out=vllm MODEL"):
        from genset.dynamo import vllm  # noqa: F401
    binary = tmp_path / "genset"
    binary.write_text('#!/bin/sh\necho "$*"\n')
    binary.chmod(0o755)

    def ends(module: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", module, "--http-port", "1"]
        environment = {**os.environ, BINARY_VARIABLE: str(binary)}
        source = Path(frontend.__file__).parents[1]
        return subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, check=False)

    absent = ends("genset.dynamo.sglang")
    assert absent.returncode == 1 and "out=sglang MODEL" in absent.stderr, absent
    for module, expected in [
        ("genset.dynamo.frontend", "run in=http out=dyn --http-port 1\n"),
        ("genset.dynamo.common.backend.sample_main", "run in=dyn://genset out=sample --model-name sample --http-port 1\n"),
    ]:
        ran = ends(module)
        assert ran.stdout == expected, ran.stderr


def test_a_frontend_takes_dynamo_s_flags() -> None:
    from genset.dynamo.frontend import translated

    for given, expected in [
        ("--http-port 1 --router-mode kv", "dyn --http-port 1 --router-mode kv"),
        ("--no-kv-events --http-port=1", "dyn --use-kv-events=false --http-port=1"),
        ("--namespace prod --kv-events", "dyn://prod --use-kv-events=true"),
        ("--tls-cert-path c.pem --tls-key-path=k.pem", "dyn --http-tls-cert=c.pem --http-tls-key=k.pem"),
        ("--router-ttl 60 --busy-threshold 0.9", "dyn --kv-approx-ttl=60 --busy-threshold 0.9"),
    ]:
        workers, flags = translated(given.split())
        assert " ".join([workers, *flags]) == expected


def test_a_name_of_dynamo_s_that_is_not_here_says_what_to_use() -> None:
    for module, name, instead in [
        ("_core", "register_llm", "genset.dynamo.llm"),
        ("_core", "OfTomorrow", "coming-from-dynamo.md"),
        ("common", "of_tomorrow", "coming-from-dynamo.md"),
        ("common.backend", "DisaggregationMode", "role=..."),
        ("common.backend", "OfTomorrow", "coming-from-dynamo.md"),
        ("llm", "ModelInput", "ModelType.Backend"),
        ("llm", "HttpError", "InvalidArgument is a 400"),
        ("llm.exceptions", "OfTomorrow", "coming-from-dynamo.md"),
        ("runtime", "OfTomorrow", "coming-from-dynamo.md"),
        ("runtime.logging", "of_tomorrow", "coming-from-dynamo.md"),
        ("sdk", "of_tomorrow", "coming-from-dynamo.md"),
    ]:
        with pytest.raises(ImportError, match=f"genset.dynamo.{module} has no {name}: .*{instead}"):
            exec(f"from genset.dynamo.{module} import {name}", {})
    errors = importlib.import_module("genset.dynamo.llm.exceptions")
    assert errors.ConnectionTimeout is exceptions.CannotConnect


def test_a_worker_of_dynamo_s_may_say_whether_it_needs_nats(monkeypatch: pytest.MonkeyPatch) -> None:
    from genset.dynamo.runtime import dynamo_worker

    async def served(main: Any, static: bool, **options: Any) -> Any:
        return static, options, await main("runtime")

    async def main(runtime: str, more: int) -> Any:
        return runtime, more

    monkeypatch.setattr("genset.runtime.serve_until_signalled", served)
    programs = [dynamo_worker(enable_nats=False)(main), dynamo_worker(static=True)(main), dynamo_worker(main)]
    for program, is_static in zip(programs, (False, True, False)):
        assert asyncio.run(program(7)) == (is_static, {}, ("runtime", 7))


def test_a_context_names_its_trace_as_dynamo_s_does() -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    for context, named in [(Context("r", traceparent=f"00-{trace}-{span}-01"), (trace, span)), (Context("r"), (None, None))]:
        assert (context.trace_id, context.span_id) == named


def test_arguments_of_dynamo_s_decorators_that_have_no_place_say_what_to_do() -> None:
    sdk = importlib.import_module("genset.dynamo.sdk")
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (sdk.service, {"app": object(), "dynamo": {"namespace": "n"}}, r"@service\(app=...\): .*out=dyn"),
        (sdk.service, {"traffic": {"timeout": 30}}, r"@service\(traffic=...\): .*timeout=30"),
        (sdk.dynamo_endpoint, {"is_api": True}, r"@dynamo_endpoint\(is_api=...\): .*model=..."),
    ]
    for decorator, arguments, instead in refused:
        with pytest.raises(TypeError, match=instead):
            decorator(**arguments)
    made = sdk.service(dynamo={"namespace": "n"}, workers=2)(type("Made", (), {}))
    assert made.__name__ == "Made"


def test_an_endpoint_is_served_with_dynamo_s_arguments(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        served: list[Any] = []

        async def serve(service: Any) -> None:
            served.append(service)

        bridge = types.SimpleNamespace(loop=asyncio.get_running_loop(), number=lambda: 1)
        endpoint = Endpoint(cast(Any, types.SimpleNamespace(_bridge=bridge, _models={}, serve=serve)), ("a", "b", "c"))
        await endpoint.serve_endpoint(lambda request: request, graceful_shutdown=True, metrics_labels=[("model", "m")], health_check_payload={"x": 1})
        assert [service.name for service in served] == ["a.b.c"]

    asyncio.run(main())
    assert "metrics_labels have no effect" in caplog.text and "health_check_payload has no effect" in caplog.text


def test_dynamo_run_is_the_binary_by_that_name() -> None:
    # A shell prints the name by which it was started.
    words = [sys.executable, "-m", "genset.dynamo.run", "-c", "echo $0"]
    environment = {**os.environ, BINARY_VARIABLE: "/bin/sh"}
    ran = subprocess.run(words, cwd=Path(frontend.__file__).parents[1], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout == "dynamo-run\n", ran.stderr


def test_publishers_of_dynamo_s_say_what_they_take_here() -> None:
    llm = importlib.import_module("genset.dynamo.llm")
    for publisher, instead in [
        (llm.KvEventPublisher, "hashes of blocks"),
        (llm.KvMetricsPublisher, "a dictionary of counts"),
        (llm.WorkerMetricsPublisher, "a dictionary of counts"),
    ]:
        for arguments, named in [((), {}), (("component", 1, 16), {}), ((), {"worker_id": 1})]:
            with pytest.raises(exceptions.InvalidArgument, match=instead):
                publisher(*arguments, **named)
        endpoint = Endpoint(cast(Any, None), ("a", "b", "c"))
        assert publisher(endpoint)._endpoint is endpoint
        assert publisher(endpoint=endpoint)._endpoint is endpoint


def test_a_runtime_config_of_dynamo_s_gives_its_parsers() -> None:
    runtime = types.SimpleNamespace(dyn_tool_call_parser="hermes", dyn_reasoning_parser="qwen3", reasoning_parser="deepseek_r1")
    config = WorkerConfig.from_runtime_config(runtime)
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "deepseek_r1")


def test_a_runtime_config_of_dynamo_s_gives_its_role() -> None:
    class Mode(enum.Enum):
        PREFILL = "prefill"

    def config(mode: Any, **overrides: Any) -> WorkerConfig:
        return WorkerConfig.from_runtime_config(types.SimpleNamespace(disaggregation_mode=mode), **overrides)

    for mode, role in [("agg", "aggregated"), ("decode", "decode"), (Mode.PREFILL, "prefill"), (None, "aggregated")]:
        assert config(mode).role == role
    assert (config("prefill").component, config("prefill", role="decode").role) == ("prefill", "decode")
    with pytest.raises(exceptions.InvalidArgument, match="role: 'encode' is none of aggregated, prefill, decode"):
        config("encode")
