"""Programs that others wrote for Dynamo, extracted from their documents and run with changed imports.

The documents are neither part of this repository nor tested in CI. CI tests our own programs with the same names, which the guide
"Coming from Dynamo" shows and `test_guides.py` runs. These tests run if the documents are beside the checkout, or in the folder that
GENSET_SEEDS names; the end of the report says whether they did. What a document leaves to its reader (`engine = ...`, a comment in
place of a body) is filled in here. Nothing else is changed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_S, SEEDS, Program, run
from pydantic import BaseModel
from test_deploy import free_port
from test_llm import MODEL, ask, frontend, wait_for_model

from genset import sdk
from genset.runtime import Runtime

HUB_ID = "Qwen/Qwen3-0.6B"

class Document:
    """One of the documents."""

    def __init__(self, number: str) -> None:
        (path,) = SEEDS.glob(f"{number}_*.txt")
        self._blocks: list[tuple[str, str]] = []
        self._taken: set[str] = set()
        begun: tuple[str, list[str]] | None = None
        for line in path.read_text().splitlines():
            if not line.lstrip().startswith("```"):
                if begun is not None:
                    begun[1].append(line)
            elif begun is None:
                begun = (line.strip("` "), [])
            else:
                self._blocks.append((begun[0], textwrap.dedent("\n".join(begun[1])) + "\n"))
                begun = None

    def take(self, *marks: str) -> str:
        """The only block that contains all of `marks`."""
        (text,) = [text for _, text in self._blocks if all(mark in text for mark in marks)]
        self._taken.add(text)
        return re.sub(r"^(from|import) dynamo\b", r"\1 genset.dynamo", text, flags=re.MULTILINE)

    def assert_all_taken(self) -> None:
        """Asserts that every Python block was run."""
        assert [text for language, text in self._blocks if language == "python" and text not in self._taken] == []


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the Hub in which the documents' model is our own."""
    repository = tmp_path / "hub" / ("models--" + HUB_ID.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in MODEL.iterdir():
        (repository / "snapshots" / ("0" * 40) / file.name).symlink_to(file.resolve())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.mark.parametrize("number", ["000", "002"])
def test_a_worker_of_tokens(
    number: str, tmp_path: Path, start: Callable[..., Program], start_genset: Callable[..., Program]
) -> None:
    text = Document(number).take("register_llm(", "serve_endpoint(")
    # Its first lines are indented deeper than the lines around them.
    text = re.sub(r"^   (?=[#@a])", "", text, flags=re.MULTILINE)
    text, main = text.split("if __name__")
    filled = """
import asyncio
import uvloop

engine = "reverser"


async def generate(self, request):
    for token in request["token_ids"][-3:]:
        yield {"token_ids": [token]}
    yield {"token_ids": [], "finish_reason": "stop"}


RequestHandler.__init__ = lambda self, engine: None
RequestHandler.generate = generate
"""
    program = tmp_path / "worker.py"
    program.write_text(f"{text}{filled}\nif __name__{main}")
    address = frontend(start_genset)
    worker = start(str(program))
    wait_for_model(address, HUB_ID, worker)
    body = {"model": HUB_ID, "messages": [{"role": "user", "content": "hello"}]}
    answer = ask(address, "/v1/chat/completions", body)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 3)
    assert worker.stop() == 0


def test_the_text_processor_and_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_genset: Callable[..., Program]
) -> None:
    document = Document("001")
    monkeypatch.chdir(tmp_path)
    Path("processor.py").write_text(document.take("class TextProcessor:"))
    Path("client.py").write_text(document.take("async def call_text_processor"))
    graph = start_genset("serve", "processor:TextProcessor")
    graph.wait_for("demo.TextProcessor.generate: served by")
    ran = subprocess.run([sys.executable, "client.py"], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (ran.returncode, ran.stdout) == (0, "Response: Processed: Hello, Dynamo!\n"), ran.stderr
    assert graph.stop() == 0
    # What it logs itself is in the service's log.
    assert any("Processing text: Hello, Dynamo!" in line for line in graph.lines)


def test_every_other_block_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document("001")
    for mark in ("class TextProcessor:", "async def call_text_processor"):
        document.take(mark)

    class Request(BaseModel):
        text: str = ""

    names: dict[str, Any] = {"PrefillRequest": Request, "DecodeRequest": Request, "__name__": "seed"}
    exec(
        "import logging\nfrom collections.abc import AsyncIterator\n"
        "from genset.dynamo.sdk import DYNAMO_IMAGE, dynamo_endpoint, service\nlogger = logging.getLogger('seed')\n",
        names,
    )
    served: list[type] = []

    def make(text: str, *classes: str) -> None:
        exec(text, names)
        served.extend(names[name] for name in classes)

    def in_class(name: str, method: str, rest: str = "") -> str:
        return f"@service(namespace='seed')\nclass {name}:\n" + textwrap.indent(method + rest, "    ")

    # The types come first, then the skeleton that uses them.
    make(document.take("class RequestType(BaseModel):", "# Add other fields"))
    make(document.take("class YourWorker:"), "YourWorker")
    make(document.take("class PrefillWorker:", "class DecodeWorker:"), "PrefillWorker", "DecodeWorker")
    vllm = types.ModuleType("vllm.entrypoints.openai.protocol")
    vllm.__dict__["ChatCompletionRequest"] = type("ChatCompletionRequest", (Request,), {"__module__": "seed"})
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.openai"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, vllm.__name__, vllm)
    imported, method = document.take("ChatCompletionRequest", "my_chat_completions_endpoint").split("\n\n", 1)
    make(imported + "\n" + in_class("Chat", method, "\n    return {'said': request.text}\n"), "Chat")
    tried = document.take("except Exception as e:").replace("# Your logic here", "raise KeyError('mine')")
    operation = "async def some_async_operation(self):\n    return 7\n\n"
    make(in_class("Best", operation + document.take("some_async_operation"), textwrap.indent(tried, "    ")), "Best")
    method = "    @dynamo_endpoint()\n    async def f(self, request): return 1"
    make(document.take('"gpu": "1"').rstrip() + "\nclass Resourceful:\n" + method)
    document.assert_all_taken()
    assert sdk.ServiceSpec.of(names["Resourceful"]).resources == {"cpu": "10", "memory": "20Gi", "gpu": "1"}

    async def main() -> None:
        async with await Runtime.connect() as runtime, await Runtime.connect() as caller:
            serving = [asyncio.ensure_future(sdk.serve(cls, runtime)) for cls in served]

            async def call(path: str) -> Any:
                client = await caller.endpoint(path).client()
                await client.wait_for_instances(LONG_S)
                return await client.generate(Request(text="hi"))

            assert await call("your_namespace/YourWorker/your_endpoint") is None
            assert await call("dynamo.PrefillWorker.prefill") is None
            assert await call("dynamo.DecodeWorker.decode") is None
            assert await call("seed.Chat.my_chat_completions_endpoint") == {"said": "hi"}
            with pytest.raises(Exception, match="KeyError: 'mine'"):
                await call("seed.Best.generate")
            await runtime.shutdown()
            await asyncio.gather(*serving)

    run(main())


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package that the document on engines builds step by step."""
    document = Document("003")
    methods = [
        document.take("async def from_args("),
        document.take("async def start(self", "heavy_init"),
        document.take("_next_token"),
        document.take("async def abort("),
        document.take("async def cleanup("),
    ]
    filled = """
    async def _next_token(self, prompt):
        await asyncio.sleep(0)
        return 40


async def heavy_init(model_name):
    return HeavyEngine()


class HeavyEngine:
    async def cancel(self, request_id):
        pass

    async def shutdown(self):
        pass
"""
    refused = document.take("raise InvalidArgument(")
    names: dict[str, Any] = {}
    exec(refused, names)
    with pytest.raises(names["InvalidArgument"], match="empty prompt"):
        asyncio.run(names["generate"](None, {}, None))
    source = tmp_path / "src/my_backend"
    source.mkdir(parents=True)
    body = "\n".join(textwrap.indent(method, "    ") for method in methods)
    (source / "engine.py").write_text(document.take("class MyBackend(LLMEngine):") + "\n" + body + filled)
    (source / "main.py").write_text(document.take("run(MyBackend)"))
    (source / "__init__.py").write_text("from .engine import MyBackend\n")
    (tmp_path / "test_engine.py").write_text(document.take("class _StubContext:"))
    document.assert_all_taken()
    return tmp_path


def test_the_tests_of_an_engine(package: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_engine.py"]
    environment = {**os.environ, "PYTHONPATH": "src"}
    ran = subprocess.run(words, cwd=package, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_command: Callable[..., Program]) -> None:
    """An etcd and a NATS, with the documents' variables set to them."""
    client, nats = f"http://127.0.0.1:{free_port()}", str(free_port())
    urls = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", "--listen-peer-urls=http://127.0.0.1:0"]
    etcd = start_command("etcd", f"--data-dir={tmp_path / 'etcd'}", *urls)
    broker = start_command("nats-server", "--addr", "127.0.0.1", "--port", nats)
    monkeypatch.setenv("ETCD_ENDPOINTS", client)
    monkeypatch.setenv("NATS_SERVER", f"nats://127.0.0.1:{nats}")
    monkeypatch.delenv("GENSET_DISCOVERY_PATH")
    etcd.wait_for("ready to serve client requests")
    broker.wait_for("Server is ready")


def test_an_engine_serves(
    package: Path, servers: None, monkeypatch: pytest.MonkeyPatch, start_genset: Callable[..., Program]
) -> None:
    document = Document("003")
    monkeypatch.setenv("PYTHONPATH", str(package / "src"))
    # Its worker asks for tcp, and the frontend for no plane.
    address = frontend(start_genset)
    worker = Program(sys.executable, "-m", "my_backend.main", "--model-name", HUB_ID, "--namespace", "dynamo")
    try:
        wait_for_model(address, HUB_ID, worker)
        (body,) = re.findall(r"-d '(\{.*?\})'$", document.take("curl http"), flags=re.MULTILINE | re.DOTALL)
        answer = ask(address, "/v1/chat/completions", json.loads(body))
        assert answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        # Options that its class does not declare are passed on, with a warning.
        warm = ask(address, "/v1/chat/completions", {**json.loads(body), "temperature": 0.7, "top_p": 0.9})
        assert warm["choices"][0]["finish_reason"] in ("stop", "length")
        assert worker.stop() == 0
        assert any("discovery: etcd at" in line and "request plane: tcp" in line for line in worker.lines)
        assert any("nothing says which sampling options it honours" in line for line in worker.lines)
    finally:
        if worker.process.poll() is None:
            worker.process.kill()
