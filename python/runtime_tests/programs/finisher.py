"""Has work to finish after its drain: `finisher.py engine|service|function MODEL_PATH`."""

import asyncio
import sys
from pathlib import Path

from genset import WorkerConfig, sdk
from genset.backend import Worker
from genset.runtime import Runtime, worker

sys.path.insert(0, str(Path(__file__).parents[2]))

from sample_engine import SampleEngine  # noqa: E402


async def finish(runtime: Runtime):
    # The drain is over, but this is not.
    await runtime.shutdown()
    for _ in range(10):
        await asyncio.sleep(0)
    print("finished", flush=True)


class Engine(SampleEngine):
    async def cleanup(self):
        await super().cleanup()
        await finish(self.runtime)


@sdk.service(namespace="py")
class Service:
    @sdk.on_start
    async def begin(self):
        self.runtime = await sdk.get_runtime()

    @sdk.on_shutdown
    async def end(self):
        await finish(self.runtime)

    @sdk.endpoint()
    async def generate(self, request):
        return request


@worker()
async def main(runtime: Runtime):
    what, path = sys.argv[1:]
    if what == "engine":
        engine = Engine()
        engine.runtime = runtime
        await Worker(engine, WorkerConfig(namespace="py", model_name="sample", model_path=path), runtime=runtime).run()
    elif what == "service":
        await sdk.serve(Service, runtime)
    else:
        await runtime.endpoint("py.finisher.generate").serve_endpoint(Service().generate)
        await finish(runtime)


asyncio.run(main())
