"""A `BatchEngine` that does what the model's name asks for. "gate" is a step that waits for the operation `wake`; `sleep` returns
when such a step runs, and `stop_profile` returns the steps so far."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from genset import BatchEngine, Context, EngineConfig, GenerateRequest, StepOutput, WorkerConfig
from genset.backend import run
from genset.exceptions import InvalidArgument, Overloaded


class Sequence:
    def __init__(self, what: str, name: str, max_tokens: int) -> None:
        self.what = what
        self.name = name
        self.left = max_tokens


class StepsEngine(BatchEngine[Sequence]):
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.is_at_gate = threading.Event()
        self.ended: list[str] = []
        self.most = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[StepsEngine, WorkerConfig]:
        return cls(), WorkerConfig()

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="steps", context_length=1 << 20, inputs=("tokens", "text"))

    def begin(self, request: GenerateRequest, context: Context) -> Sequence:
        if request["model"] == "refuse":
            raise InvalidArgument("not this one", field="model")
        return Sequence(request["model"], context.id(), request["stop_conditions"].get("max_tokens") or 1)

    def step(self, batch: list[Sequence]) -> list[StepOutput]:
        self.most = max(self.most, len(batch))
        if any(sequence.what == "short" for sequence in batch):
            return []
        return [self.next(sequence) for sequence in batch]

    def next(self, sequence: Sequence) -> Any:
        if sequence.what == "fault":
            raise ZeroDivisionError("by nought")
        if sequence.what == "exit":
            raise SystemExit(3)
        if sequence.what == "gate":
            self.is_at_gate.set()
            assert self.gate.wait(60)
        outputs: dict[str, Any] = {
            "overloaded": Overloaded("later", retry_after=1.5),
            "odd_error": Overloaded("later \ud83d", retry_after=-0.2),
            "word": "word",
            "token_below_0": -1,
            "text": {"text": "hello", "token_count": 1, "finish_reason": "stop"},
        }
        if sequence.what in outputs:
            return outputs[sequence.what]
        if sequence.left == 0:
            return {"finish_reason": "length"}
        sequence.left -= 1
        return sequence.left

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence.name)

    async def control(self, op: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        if op == "sleep":
            assert await asyncio.to_thread(self.is_at_gate.wait, 60)
            return None
        if op == "wake":
            self.gate.set()
            return None
        return {"location": f"{self.most} {' '.join(sorted(self.ended))}"}

    async def cleanup(self) -> None:
        print(f"cleanup after {' '.join(sorted(self.ended))}", flush=True)


if __name__ == "__main__":
    run(StepsEngine)
