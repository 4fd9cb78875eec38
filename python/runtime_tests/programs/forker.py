"""Uses a runtime after `os.fork`."""

import asyncio
import os

from genset.runtime import Runtime


async def main():
    runtime = await Runtime.connect()
    client = await runtime.endpoint("demo.text.upper").client()
    child = os.fork()
    if child == 0:
        try:
            client.random({})
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    await runtime.shutdown()
    raise SystemExit(os.waitstatus_to_exitcode(status))


asyncio.run(main())
