"""An engine that starts a child process, prints its id, and blocks its event loop forever."""

from __future__ import annotations

import asyncio
import subprocess
import threading

from genset import EngineConfig, _channel
from genset.backend import run
from sample_engine import SampleEngine


class OrphanEngine(SampleEngine):
    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        asyncio.get_running_loop().call_later(0.1, self._block)
        return config

    def _block(self) -> None:
        print("started", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    _channel.ORPHAN_GRACE_S = 0.1
    run(OrphanEngine)
