"""A worker that counts: `{"to": N, "pause": S}` yields 0 to N-1."""

import asyncio

from genset.runtime import Runtime, worker


async def count(request):
    print("begun", flush=True)
    for number in range(request["to"]):
        yield {"number": number}
        await asyncio.sleep(request.get("pause", 0))
    print("counted", flush=True)


@worker(static=False)
async def main(runtime: Runtime):
    component = runtime.namespace("demo").component("counter")
    await component.create_service()
    endpoint = component.endpoint("count")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(count))
    client = await endpoint.client()
    while runtime.worker_id not in client.instance_ids():
        await asyncio.sleep(0.02)
    print("ready", flush=True)
    await serving
    print("left", flush=True)


asyncio.run(main())
