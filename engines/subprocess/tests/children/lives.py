"""An engine that is started several times. The fault, its first argument, and the process's number decide what each process
does. The second argument names the file that counts the processes."""

import asyncio
import os
import sys

from genset import EngineConfig, LLMEngine, WorkerConfig
from genset.backend import run
from genset.exceptions import NotFound

FAULT, NOTES = sys.argv[1], sys.argv[2]


def number_in_a_row():
    with open(NOTES, "a") as notes:
        notes.write(f"{os.getpid()}\n")
    with open(NOTES) as notes:
        return len(notes.readlines())


class Lives(LLMEngine):
    @classmethod
    async def from_args(cls, argv=None):
        return cls(), WorkerConfig()

    async def start(self, worker_id):
        self.life = number_in_a_row()
        if FAULT == "fails_in_start" or (FAULT == "never_again" and self.life > 1):
            os._exit(4)
        if FAULT == "misses_its_weights_again" and self.life > 1:
            raise NotFound("no such weights")
        if FAULT == "second_hangs_in_start" and self.life == 2:
            await asyncio.Event().wait()
        if self.life == 1:
            self.worker.publish_load({"running_requests": 3})
            self.worker.publish_kv_stored([1, 2])
        if FAULT == "first_reports_dead" and self.life == 1:
            self.worker.report_dead("the device is lost")
        # The capacity may differ between runs.
        vocab_size = 200 if FAULT == "another_engine" and self.life > 1 else 100
        return EngineConfig(model="lives", context_length=1000, vocab_size=vocab_size, total_kv_blocks=self.life)

    async def generate(self, request, context):
        if self.life == 1:
            os._exit(3)
        yield {"token_ids": [5]}
        yield {"finish_reason": "stop"}

    async def cleanup(self):
        pass


if __name__ == "__main__":
    run(Lives)
