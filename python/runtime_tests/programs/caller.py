"""A script that only calls, and is interrupted while it waits."""

import asyncio

from genset.runtime import get_runtime


async def main():
    runtime = await get_runtime()
    client = await runtime.endpoint("demo/counter/count").client()
    print("calls", flush=True)
    async for item in client.generate({"to": 1_000_000, "pause": 0.05}):
        print(item.number, flush=True)


asyncio.run(main())
