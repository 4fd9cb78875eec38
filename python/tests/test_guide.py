"""docs/guide/python-engines.md: its files, put together, do what the guide says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from genset._frames import Kind
from worker_stub import WorkerStub

REPOSITORY = Path(__file__).parent.parent.parent
GUIDE = REPOSITORY / "docs/guide/python-engines.md"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {
    "pyproject.toml",
    "src/my_backend/batch.py",
    "src/my_backend/cache.py",
    "src/my_backend/engine.py",
    "src/my_backend/inside.py",
    "src/my_backend/main.py",
    "src/my_backend/telemetry.py",
    "tests/test_engine.py",
    "tests/test_conformance.py",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's package. Pieces of a file are separated by one line inside a class, by two between classes."""
    pieces = defaultdict(list)
    for language, name, text in BLOCK.findall(GUIDE.read_text()):
        assert name or language not in ("python", "toml"), f"a piece of no file is not tested: {text}"
        if name:
            pieces[name].append(text)
    assert pieces.keys() == FILES
    folder = tmp_path_factory.mktemp("my-backend")
    for name, texts in pieces.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(texts[:1] + [("\n" if text[0] == " " else "\n\n") + text for text in texts[1:]]))
    (folder / "src/my_backend/__init__.py").touch()
    return folder


def python(package: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(package / "src"), str(REPOSITORY / "python/src")])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run([sys.executable, *words], cwd=package, env=env, capture_output=True, text=True, check=False)


def test_the_guides_tests_pass(package: Path) -> None:
    ran = python(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_engine.py")
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout


def test_the_guides_kit_says_what_it_lacks(package: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_conformance.py"]
    ran = python(package, *words, GENSET_BIN="/no/such/genset")
    assert ran.returncode == 1
    assert "GENSET_BIN=/no/such/genset is no program. Build it with" in ran.stdout


def test_the_guides_code_is_typed(package: Path) -> None:
    # The version that the package's own types are checked for, whose standard library mypy has read already.
    ran = python(package, "-m", "mypy", "--strict", "--python-version", "3.10", "src")
    assert ran.returncode == 0, ran.stdout


def test_the_guides_program_becomes_the_worker(package: Path, tmp_path: Path) -> None:
    binary = tmp_path / "genset"
    binary.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    binary.chmod(0o755)
    ran = python(package, "-m", "my_backend.main", "--model-name", "X", "--namespace", "dyn", GENSET_BIN=str(binary))
    words = json.loads(ran.stdout)
    assert words[:2] == ["run", "in=dyn://dyn.backend.generate"]
    assert words[2].endswith("-m my_backend.main --model-name X --namespace dyn")


def test_the_guides_program_serves(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package / "src"))
    worker = WorkerStub("-m", "my_backend.main")
    worker.start()
    worker.request(2, "generate", {"model": "m", "input": {"tokens": [1]}, "stop": {"max_tokens": 1}})
    assert worker.frame()[0] == Kind.ITEM
    worker.kill()


def test_the_guides_batch_engine_answers(package: Path) -> None:
    script = (
        "import asyncio; from genset.testing import collect; from my_backend.batch import MyBatchBackend\n"
        "request = {'token_ids': [1, 2047], 'stop_conditions': {'max_tokens': 3}}\n"
        "chunks = asyncio.run(collect(MyBatchBackend(), request))\n"
        "assert [chunk['token_ids'] for chunk in chunks] == [[0], [1], [2]], chunks\n"
        "assert chunks[-1]['finish_reason'] == 'length'"
    )
    ran = python(package, "-c", script)
    assert ran.returncode == 0, ran.stderr


def test_the_histogram_of_the_guide_is_published(package: Path) -> None:
    script = (
        "from genset import WorkerHandle; from my_backend.telemetry import Telemetry; seen = []\n"
        "t = Telemetry(WorkerHandle(seen.append)); t.steps.add(); t.step_s.observe(0.01); t.publish()\n"
        "assert [m['kind'] for m in seen[0]['metrics']] == ['counter', 'histogram'], seen"
    )
    ran = python(package, "-c", script)
    assert ran.returncode == 0, ran.stderr
