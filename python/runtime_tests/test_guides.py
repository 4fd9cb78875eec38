"""The programs that the guides show run, and print what the guides say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_S, Program
from test_llm import MODEL, ask, frontend, wait_for_model

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)(?: (file|output)=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def guide(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Writes a guide's programs into a folder; returns their expected outputs, by name."""
    outputs = {}
    for language, what, name, text in BLOCK.findall((REPOSITORY / "docs/guide" / request.param).read_text()):
        assert name or language == "sh", f"a block of no file is not tested: {text}"
        if what == "file":
            (tmp_path / name).write_text(text)
        elif what == "output":
            outputs[name] = text
    monkeypatch.chdir(tmp_path)
    return outputs


def printed(name: str) -> str:
    ran = subprocess.run([sys.executable, name], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def completion(address: str, name: str, worker: Program, **options: Any) -> Any:
    """A completion of a worker's model, once the frontend knows the model."""
    wait_for_model(address, name, worker)
    return ask(address, "/v1/completions", {"model": name, "prompt": "one two three four", **options})


@pytest.mark.parametrize("guide", ["python-workers.md"], indirect=True)
def test_workers(guide: dict[str, str], start: Callable[..., Program], start_genset: Callable[..., Program]) -> None:
    worker = start(str(Path("worker.py").resolve()))
    worker.wait_for("served by instance")
    assert printed("client.py") == guide["client.py"]
    assert worker.stop() == 0
    address = frontend(start_genset)
    model = start(str(Path("model.py").resolve()), str(MODEL))
    answer = completion(address, "backwards", model, max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    assert model.stop() == 0


@pytest.mark.parametrize("guide", ["python-services.md"], indirect=True)
def test_services(guide: dict[str, str], start_genset: Callable[..., Program]) -> None:
    shop = start_genset("serve", "shop:Shout", "--Shout.end=!!")
    shop.wait_for("demo.Shout.shout: served by")
    assert printed("call.py") == guide["call.py"]
    assert shop.stop() == 0
    assert "[Shout] closed" in shop.lines


@pytest.mark.parametrize("guide", ["coming-from-dynamo.md"], indirect=True)
def test_programs_with_the_names_of_dynamo(
    guide: dict[str, str], start: Callable[..., Program], start_genset: Callable[..., Program]
) -> None:
    graph = start_genset("serve", "ported_graph:Front")
    graph.wait_for("ported.Front.say: served by")
    assert printed("ported_client.py") == guide["ported_client.py"]
    assert graph.stop() == 0
    assert any(line.startswith("[Back]") and line.endswith("left") for line in graph.lines), graph.lines
    address = frontend(start_genset)
    for name, model, options, expected in (
        ("ported_worker.py", "ported", {}, ("stop", 3)),
        ("ported_engine.py", "constant", {"max_tokens": 5}, ("length", 5)),
    ):
        arguments = ["--model-path", str(MODEL)] if model == "constant" else [str(MODEL)]
        worker = start(str(Path(name).resolve()), *arguments)
        answer = completion(address, model, worker, **options)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == expected
        assert worker.stop() == 0, "\n".join(worker.lines)


def test_imports_of_those_who_come_from_dynamo() -> None:
    text = (REPOSITORY / "docs/guide/coming-from-dynamo.md").read_text()
    lines = re.findall(r"`(from genset[^`\n]*)`", text)
    assert len(lines) == 28
    for line in lines:
        exec(line, {})
