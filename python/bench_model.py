"""What a token of a model in Python costs its worker, behind a frontend: CPU of all the worker's processes, and their memory.

    python bench_model.py MODEL_PATH --streams 64 --tokens 1500 --requests 10000

It needs the installed wheel of a release build. The ways in which a model can be served, one after the other:

    handler   a handler with register_llm, in the worker's process
    worker    an LLMEngine with genset.backend.Worker, in the worker's process
    run       an LLMEngine with genset.backend.run, in a process beside the worker
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from genset import Context, EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from genset.backend import find_binary, run
from genset.llm import ModelType, register_llm
from genset.runtime import Runtime, worker

WAYS = ("handler", "worker", "run")
PATH_VARIABLE = "BENCH_MODEL_PATH"


async def generate(request: Any) -> AsyncIterator[Any]:
    """Yields as many tokens as requested, as fast as they are taken."""
    wanted = request["stop_conditions"].get("max_tokens") or 1
    for place in range(1, wanted + 1):
        chunk = {"token_ids": [40 + place % 50]}
        if place == wanted:
            chunk["finish_reason"] = "length"  # type: ignore[assignment]
        yield chunk


class Engine(LLMEngine):
    """The same, as an engine."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Engine, WorkerConfig]:
        return cls(), WorkerConfig(namespace="bench", model_name="run", model_path=os.environ[PATH_VARIABLE])

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="bench", context_length=1 << 20, sampling=())

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        return generate(request)  # type: ignore[return-value]

    async def cleanup(self) -> None:
        pass


@worker()
async def serve_handler(runtime: Runtime) -> None:
    endpoint = runtime.endpoint("bench.backend.generate")
    await register_llm(ModelType.Backend, endpoint, os.environ[PATH_VARIABLE], "handler", sampling=())
    await endpoint.serve_endpoint(generate)


def serve(way: str) -> None:
    """The worker's process."""
    if way == "handler":
        asyncio.run(serve_handler())
    elif way == "worker":
        from genset.backend import Worker

        config = WorkerConfig(namespace="bench", model_name="worker", model_path=os.environ[PATH_VARIABLE])
        asyncio.run(Worker(Engine(), config).run())
    else:
        run(Engine)


class Tree:
    """A process and all its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def _stats(self) -> Iterator[tuple[int, list[str]]]:
        fields = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit():
                    fields[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()
        wanted = [self._pid]
        for pid in wanted:
            wanted += [other for other, each in fields.items() if int(each[1]) == pid]
            if pid in fields:
                yield pid, fields[pid]

    def cpu_s(self) -> float:
        """CPU time used, in seconds."""
        return sum(int(each[11]) + int(each[12]) for _, each in self._stats()) / os.sysconf("SC_CLK_TCK")

    def resident_kb(self) -> int:
        """Memory in use, in kB."""
        return sum(int(each[21]) for _, each in self._stats()) * os.sysconf("SC_PAGE_SIZE") // 1024


async def ask(port: int, model: str, tokens: int, is_stream: bool) -> None:
    """Runs one completion to its end."""
    body = {"model": model, "prompt": "a", "max_tokens": tokens, "stream": is_stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read(4096)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode())
    while await reader.read(1 << 16):
        pass
    writer.close()


async def measure(port: int, way: str, tree: Tree, options: argparse.Namespace) -> dict[str, float]:
    streams, tokens = options.streams, options.tokens

    async def many(count: int) -> None:
        for _ in range(count):
            await ask(port, way, 1, False)

    await asyncio.gather(*(ask(port, way, 50, True) for _ in range(streams)))
    costs, rates = [], []
    for _ in range(options.rounds):
        before, started = tree.cpu_s(), time.perf_counter()
        await asyncio.gather(*(ask(port, way, tokens, True) for _ in range(streams)))
        seconds = time.perf_counter() - started
        costs.append((tree.cpu_s() - before) / (streams * tokens) * 1e6)
        rates.append(streams * tokens / seconds)
    # One-time allocations are done by then.
    await asyncio.gather(*(many(max(1, options.requests // 10 // streams)) for _ in range(streams)))
    resident = tree.resident_kb()
    await asyncio.gather(*(many(options.requests // streams) for _ in range(streams)))
    return {
        "us_per_token": statistics.median(costs),
        "tokens_per_s": statistics.median(rates),
        "growth_kb": tree.resident_kb() - resident,
    }


@contextlib.contextmanager
def started(words: list[str], until: str) -> Iterator[tuple[int, str]]:
    """Starts a program and waits for its line with `until`: its id and that line."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 120
            while True:
                log.seek(0)
                found = [line for line in log.read().splitlines() if until in line]
                if found:
                    break
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(f"{words} did not say {until!r}:\n{log.read()}")
                time.sleep(0.05)
            yield process.pid, found[0]
        finally:
            process.terminate()
            process.wait()


async def listed(port: int, model: str) -> None:
    """Waits until the frontend knows the model."""
    while True:
        try:
            await ask(port, model, 1, False)
            return
        except RuntimeError as error:
            if " 404 " not in str(error) and " 503 " not in str(error):
                raise
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model_path", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is shown")
    parser.add_argument("--requests", type=int, default=10_000, help="requests over which memory is looked at")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        serve(options.way)
        return
    with tempfile.TemporaryDirectory() as fleet:
        os.environ["GENSET_DISCOVERY_PATH"] = os.path.join(fleet, "fleet")
        os.environ[PATH_VARIABLE] = str(options.model_path.resolve())
        frontend = [find_binary(), "run", "in=http", "out=dyn", "--http-port", "0", "--access-log", "false"]
        with started(frontend, "http://127.0.0.1:") as (_, line):
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)", line)[1])  # type: ignore[index]
            for way in WAYS:
                words = [sys.executable, str(Path(__file__).resolve()), str(options.model_path), "--way", way]
                with started(words, "serv") as (pid, _):
                    asyncio.run(listed(port, way))
                    figures = asyncio.run(measure(port, way, Tree(pid), options))
                print(way, " ".join(f"{name} {value:,.1f}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
