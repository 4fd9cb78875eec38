"""A program that only calls, and is told to end while it waits: `caller.py [worker]`."""

import asyncio
import sys

from genset.runtime import get_runtime, worker


async def main(runtime):
    client = await runtime.endpoint("demo/counter/count").client()
    print("calls", flush=True)
    try:
        async for item in client.generate({"to": 1_000_000, "pause": 0.05}):
            print("number", item.number, flush=True)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise


async def script():
    await main(await get_runtime())


asyncio.run(worker()(main)() if sys.argv[1:] == ["worker"] else script())
