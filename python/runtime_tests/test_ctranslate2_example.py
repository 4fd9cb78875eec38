"""examples/python/ctranslate2-engine: a model of a real library behind `register_llm`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_S, Program, run
from test_guides import completion
from test_llm import MODEL, frontend
from test_status import get

EXAMPLE = Path(__file__).parents[2] / "examples/python/ctranslate2-engine"
TOKENS = "2048"
"""The size of the tokenizer's vocabulary."""


def test_a_handler_around_a_library_serves_its_model(
    start: Callable[..., Program], start_genset: Callable[..., Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    model = tmp_path / "model"
    model.mkdir()
    subprocess.run([sys.executable, str(EXAMPLE / "make_model.py"), str(model), TOKENS], check=True, timeout=LONG_S)
    address = frontend(start_genset)
    # A status port of its own, not the frontend's.
    monkeypatch.setenv("GENSET_STATUS_PORT", "0")
    worker = start(str(EXAMPLE / "ctranslate2_handler.py"), "--model", str(model), "--tokenizer", str(MODEL))
    port = int(worker.wait_for("status on http://127.0.0.1:").rsplit(":", 1)[1])

    def ask(**options: Any) -> Any:
        answer = completion(address, "ctranslate2", worker, max_tokens=6, ignore_eos=True, **options)
        assert answer["usage"]["completion_tokens"] == 6
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        return choice["text"]

    assert ask(temperature=0) == ask(temperature=0)
    assert len({ask(temperature=1) for _ in range(5)}) > 1
    # The library has one seed for the whole process.
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(temperature=1, seed=1)
    assert refused.value.code == 400

    async def until_counted() -> None:
        while 'ctranslate2_tokens_total{genset_endpoint="genset.ctranslate2.generate"}' not in (await get(port, "/metrics"))[1]:
            await asyncio.sleep(0.05)

    run(until_counted())
    assert worker.stop() == 0, "\n".join(worker.lines)
