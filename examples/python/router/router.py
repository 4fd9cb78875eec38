"""A router in Python with its own cost function: it follows the KV events and the load of all instances, selects one, and calls it
directly. It is a model itself, so any frontend offers it over HTTP: `python router.py MODEL_PATH`.

`genset run in=http out=dyn --router-mode kv` routes the same way by itself, and faster. Start here for a rule that it does not have.
"""

import asyncio
import contextlib
import sys

from worker import BLOCK_SIZE, block_hashes

from genset.exceptions import EngineError, Overloaded
from genset.llm import ModelType, register_llm
from genset.runtime import Context, Runtime, worker

LOOK_S = 0.1
"""The interval between two looks at the list of instances."""


class Instance:
    """The known state of one worker."""

    def __init__(self):
        self.blocks = set()
        self.load = {}
        self.mine = 0

    def cost(self, hashes):
        """Blocks to compute, plus requests ahead of this one; the lowest cost is selected."""
        cached = 0
        for block in hashes:
            if block not in self.blocks:
                break
            cached += 1
        full = self.load.get("kv_used_blocks", 0) / (self.load.get("kv_total_blocks") or 1)
        return (len(hashes) - cached) + 2 * self.mine + full


class Router:
    def __init__(self, generate, kv_events, load):
        self.clients = {"generate": generate, "kv_events": kv_events, "load": load}
        self.instances = {}
        self.tasks = {}

    async def follow(self):
        """Tracks the live instances."""
        while True:
            live = set(self.clients["generate"].instance_ids())
            for number in live - self.instances.keys():
                instance = self.instances[number] = Instance()
                self.tasks[number] = [
                    asyncio.create_task(self.follow_one("kv_events", number, instance, apply_kv)),
                    asyncio.create_task(self.follow_one("load", number, instance, apply_load)),
                ]
            for number in self.instances.keys() - live:
                del self.instances[number]
                for task in self.tasks.pop(number):
                    task.cancel()
            await asyncio.sleep(LOOK_S)

    async def follow_one(self, name, number, instance, apply):
        while True:
            # If the stream ends, or the instance is not there yet, start again with a new snapshot.
            with contextlib.suppress(EngineError):
                async for item in self.clients[name].direct(None, number):
                    apply(instance, item)
            await asyncio.sleep(LOOK_S)

    async def generate(self, request, context: Context):
        hashes = block_hashes(request)
        if not self.instances:
            # A frontend then tries another router, and this router's own worker counts it as alive.
            raise Overloaded("no worker is there; try again later", retry_after=1.0)
        number, instance = min(self.instances.items(), key=lambda each: (each[1].cost(hashes), each[0]))
        instance.mine += 1
        try:
            async for chunk in self.clients["generate"].direct(request, number, context=context):
                yield chunk
        finally:
            instance.mine -= 1

    async def state(self, request):
        """The known state of each instance, for people."""
        known = self.instances.items()
        return {f"{number:x}": {"blocks": len(each.blocks), "load": each.load, "mine": each.mine} for number, each in known}


def apply_kv(instance, item):
    if "snapshot" in item:
        instance.blocks = {block["hash"] for block in item["snapshot"]["blocks"]}
        return
    data = item["change"]["data"]
    if data == "cleared":
        instance.blocks.clear()
    elif "stored" in data:
        instance.blocks.update(data["stored"]["blocks"])
    else:
        instance.blocks.difference_update(data["removed"]["blocks"])


def apply_load(instance, item):
    instance.load = item


@worker()
async def main(runtime: Runtime):
    backend = runtime.namespace("routed").component("backend")
    names = ("generate", "kv_events", "load")
    router = Router(*[await backend.endpoint(name).client() for name in names])
    endpoint = runtime.endpoint("routed.router.generate")
    await register_llm(ModelType.Backend, endpoint, sys.argv[1], "routed", kv_cache_block_size=BLOCK_SIZE)

    async def serve():
        # The router is listed once it has answered its own worker's canary.
        while not router.instances:
            await asyncio.sleep(LOOK_S)
        await asyncio.gather(
            endpoint.serve_endpoint(router.generate),
            runtime.endpoint("routed.router.state").serve_endpoint(router.state),
        )

    tasks = [asyncio.create_task(router.follow()), asyncio.create_task(serve())]
    try:
        # The first to end, or to fail, ends the program.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
