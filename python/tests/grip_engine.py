"""An engine whose C code holds the GIL forever, so that no thread of the package runs any more."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import re
from pathlib import Path

from genset import EngineConfig
from genset.backend import run
from sample_engine import SampleEngine


def children() -> list[str]:
    """The child processes of this one."""
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


class GripEngine(SampleEngine):
    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        asyncio.get_running_loop().call_later(0.1, self._grip)
        return config

    def _grip(self) -> None:
        (watchdog,) = children()
        print("watchdog", watchdog, flush=True)
        # Takes about 2**60 steps, all of them in C.
        re.match("(a+)+$", "a" * 60 + "b")


if __name__ == "__main__":
    module = importlib.import_module("genset.backend.run")
    module.watch_leash = functools.partial(module.watch_leash, grace_s=0.1)  # type: ignore[attr-defined]
    run(GripEngine)
