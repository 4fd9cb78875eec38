"""What Python costs: CPU of a worker for each token, of a client for each item, memory over many requests, and the import.

    python bench_runtime.py --streams 64 --tokens 2000 --requests 100000

It needs the installed wheel of a release build. Worker and client are processes of their own; each counts its own CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

from genset.runtime import Runtime, worker


def cpu_s() -> float:
    """CPU time of this process, all threads, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_kb() -> int:
    """Memory of this process in use, in kB."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)


async def count(request: Any) -> AsyncIterator[Any]:
    """Yields a small map per token, like an engine."""
    for token in range(request["tokens"]):
        yield {"token_ids": [token]}


async def usage(request: Any) -> Any:
    return {"cpu_s": cpu_s(), "resident_kb": resident_kb()}


@worker()
async def serve(runtime: Runtime) -> None:
    """The worker's process."""
    component = runtime.namespace("bench").component("worker")
    handlers = {"count": count, "usage": usage}
    await asyncio.gather(*(component.endpoint(name).serve_endpoint(each) for name, each in handlers.items()))


async def ask(streams: int, tokens: int, requests: int) -> dict[str, Any]:
    """The client's process."""
    async with await Runtime.connect() as runtime:
        component = runtime.namespace("bench").component("worker")
        client = await component.endpoint("count").client()
        told = await component.endpoint("usage").client()

        async def read(length: int) -> int:
            number = 0
            async for _ in client.random({"tokens": length}):
                number += 1
            return number

        await asyncio.gather(*(read(50) for _ in range(streams)))
        before, own, started = await told.random(), cpu_s(), time.perf_counter()
        items = sum(await asyncio.gather(*(read(tokens) for _ in range(streams))))
        after, seconds = await told.random(), time.perf_counter() - started
        figures = {
            "items_per_s": items / seconds,
            "worker_us_per_item": (after.cpu_s - before.cpu_s) / items * 1e6,
            "client_us_per_item": (cpu_s() - own) / items * 1e6,
        }

        async def many(number: int) -> None:
            for _ in range(number):
                await read(1)

        # One-time allocations are done by then.
        await asyncio.gather(*(many(requests // 10 // streams) for _ in range(streams)))
        before, own_kb = await told.random(), resident_kb()
        await asyncio.gather(*(many(requests // streams) for _ in range(streams)))
        after = await told.random()
        figures["worker_growth_kb"] = after.resident_kb - before.resident_kb
        figures["client_growth_kb"] = resident_kb() - own_kb
        return figures


def import_ms() -> float:
    """The shortest of ten imports of everything a worker needs, minus Python's start."""

    def shortest(code: str) -> float:
        times = []
        for _ in range(10):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - started)
        return min(times) * 1000

    return shortest("import genset.llm, genset._native") - shortest("pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--part", choices=["worker", "client"], help="what this process is; both are started without it")
    arguments = parser.parse_args()
    if arguments.part == "worker":
        asyncio.run(serve())
    elif arguments.part == "client":
        print(json.dumps(asyncio.run(ask(arguments.streams, arguments.tokens, arguments.requests))))
    else:
        with tempfile.TemporaryDirectory() as fleet:
            environment = {**os.environ, "GENSET_DISCOVERY_PATH": os.path.join(fleet, "fleet")}
            command = [sys.executable, __file__, *sys.argv[1:], "--part"]
            serving = subprocess.Popen([*command, "worker"], env=environment, stderr=subprocess.DEVNULL)
            try:
                asked = subprocess.run([*command, "client"], env=environment, check=True, capture_output=True, text=True)
            finally:
                serving.terminate()
                serving.wait()
        figures = {**json.loads(asked.stdout), "import_ms": import_ms()}
        for name, value in figures.items():
            print(f"{name:>20} {value:12.1f}")


if __name__ == "__main__":
    main()
