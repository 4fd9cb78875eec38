"""A worker with its own prefix cache, which it reports to routers: `python worker.py MODEL_PATH`."""

import asyncio
import sys

from genset.kv import hash_blocks
from genset.llm import KvEventPublisher, LoadPublisher, ModelType, register_llm
from genset.runtime import Runtime, worker

BLOCK_SIZE = 16


def block_hashes(request):
    """Returns a hash for each whole block of a prompt, over all tokens up to its end: the keys that routers look up."""
    return hash_blocks(request["token_ids"], BLOCK_SIZE, cache_salt=request.get("cache_salt"), adapter=request.get("adapter"))


class Engine:
    def __init__(self, endpoint):
        self.cached = set()
        self.running = 0
        self.kv_events = KvEventPublisher(endpoint)
        self.load = LoadPublisher(endpoint)

    async def generate(self, request):
        self.running += 1
        self.publish_load()
        try:
            hashes = block_hashes(request)
            reused = sum(block in self.cached for block in hashes)
            if reused < len(hashes):
                parent = hashes[reused - 1] if reused else None
                self.kv_events.publish_stored(hashes[reused:], parent)
                self.cached.update(hashes)
            usage = {"cached_tokens": reused * BLOCK_SIZE}
            yield {"token_ids": [1], "finish_reason": "length", "completion_usage": usage}
        finally:
            self.running -= 1
            self.publish_load()

    def publish_load(self):
        self.load.publish({"running_requests": self.running, "kv_used_blocks": len(self.cached), "kv_total_blocks": 1000})


@worker()
async def main(runtime: Runtime):
    endpoint = runtime.namespace("routed").component("backend").endpoint("generate")
    await register_llm(ModelType.Backend, endpoint, sys.argv[1], "routed-worker", kv_cache_block_size=BLOCK_SIZE, kv_events=True)
    await endpoint.serve_endpoint(Engine(endpoint).generate)


if __name__ == "__main__":
    asyncio.run(main())
