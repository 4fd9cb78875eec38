"""One process of a service: `python -m genset._service MODULE:CLASS NAME`, started by `genset serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import sys

from genset import sdk
from genset.backend.run import watch_leash
from genset.runtime import KILL_S, Runtime, worker
from genset.sdk import ServiceSpec, parse_bytes
from genset.serve import CONFIG_VARIABLE, CORES_VARIABLE, LEASH_VARIABLE, READY_VARIABLE, load

logger = logging.getLogger(__name__)


def limit(spec: ServiceSpec) -> None:
    """Limits this process to its resources, as far as the system can: the memory of its data, and the cores from `genset serve`."""
    memory = spec.resources.get("memory")
    if memory is not None:
        most = parse_bytes(memory)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        except ValueError:
            # The limit that it has is lower, and only some processes may raise it.
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            logger.warning("%s: of its memory, %s, this process may have %d bytes (ulimit -d)", spec.name, memory, most)
    # A container sets none: it has its own limit, and does not know what others use.
    cores = os.environ.get(CORES_VARIABLE)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def tell_started() -> None:
    """Notifies `genset serve` that the service has started. Does nothing in a container."""
    ready = os.environ.pop(READY_VARIABLE, None)
    if ready is not None:
        # `genset serve` may be gone.
        with contextlib.suppress(OSError):
            os.write(int(ready), b"1")
            os.close(int(ready))


@worker()
async def main(runtime: Runtime, spec: ServiceSpec) -> None:
    """Serves the class until a signal."""
    await sdk.serve(spec.cls, runtime, on_started=tell_started)


if __name__ == "__main__":
    target, name = sys.argv[1:]
    # If `genset serve` is killed, nobody else drains this process.
    watch_leash(LEASH_VARIABLE, f"kill -s TERM {os.getpid()}", KILL_S)
    found = next(each for each in load(target).graph() if each.name == name)
    sdk.set_config(json.loads(os.environ.get(CONFIG_VARIABLE, "{}")))
    limit(found.adjusted(sdk.config()))
    try:
        import uvloop
    except ImportError:
        asyncio.run(main(found))
    else:
        uvloop.run(main(found))
