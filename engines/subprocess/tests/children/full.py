"""An engine on the Python package with every ability that a test needs; the model name in the request selects it."""

import asyncio
import logging
import sys
import threading

from genset import EngineConfig, LLMEngine, WorkerConfig
from genset.backend import run
from genset.exceptions import Overloaded
from genset.kv import hash_blocks
from genset.metrics import Metrics

logger = logging.getLogger("full")


class FullEngine(LLMEngine):
    def __init__(self):
        self.aborted = []
        self.produced = 0
        self.sleep_level = None

    @classmethod
    async def from_args(cls, argv=None):
        return cls(), WorkerConfig()

    async def start(self, worker_id):
        print("a stray print")
        sys.stdout.write("without an end")
        logger.warning("a warning")
        self.worker.report_progress("loading", 0.25)
        # Publishing works from any thread, and before the worker listens.
        thread = threading.Thread(target=self._publish)
        thread.start()
        await asyncio.to_thread(thread.join)
        return EngineConfig(
            model=f"full-{worker_id}",
            context_length=4096,
            vocab_size=1000,
            inputs=("tokens", "text", "chat", "embed", "score"),
            max_logprobs=2,
            guided=("json_schema", "json_object", "regex", "choice", "grammar"),
            kv_events=True,
            kv_ranks=True,
            data_parallel_size=4,
            canary={"messages": [{"role": "user", "content": "ping"}], "stop_conditions": {"max_tokens": 1}},
        )

    def _publish(self):
        self.worker.publish_kv_stored([11, 12], rank=0)
        self.worker.publish_kv_stored([11], rank=3)
        self.worker.publish_kv_removed([12], rank=0)
        self.worker.publish_kv_stored([13], parent=11, rank=3)
        self.worker.publish_kv_stored(hash_blocks(range(100), 32, cache_salt="tenant", adapter="french"), rank=1)
        self.worker.publish_load({"running_requests": 2, "kv_used_blocks": 5, "kv_total_blocks": 10})
        metrics = Metrics()
        metrics.counter("full_steps_total", "Steps").add(3)
        metrics.gauge("full_queue", "Waiting", rank="0").set(2.5)
        metrics.histogram("full_step_seconds", "Time of a step", [0.1, 1.0]).observe(0.5)
        self.worker.publish_metrics(metrics.samples())

    async def generate(self, request, context):
        async for chunk in getattr(self, request["model"])(request, context):
            yield chunk

    async def echo_context(self, request, context):
        facts = [context.id(), context.headers.get("x-tenant"), context.traceparent[:2], context.deadline_ms is not None]
        yield {"text": repr(facts), "token_count": 1, "finish_reason": "eos"}

    async def echo_request(self, request, context):
        keys = ("token_ids", "text", "messages", "embed", "guided_decoding", "stop_conditions", "data_parallel_rank")
        shown = {key: request[key] for key in keys if key in request}
        yield {"text": repr(shown), "token_count": 1}
        yield {"finish_reason": "stop"}

    async def logprobs(self, request, context):
        entry = {"logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.5}]}
        yield {"token_ids": [7], "index": 0, "logprobs": [entry]}
        yield {"token_ids": [8], "index": 0, "logprobs": [entry], "finish_reason": "length"}

    async def embed(self, request, context):
        yield {"embeddings": [[0.5, 1.0] for _ in request["embed"]]}
        yield {"finish_reason": "stop"}

    async def score(self, request, context):
        yield {"scores": [float(pair["first_tokens"]) / len(pair["token_ids"]) for pair in request["score"]]}
        yield {"finish_reason": "stop"}

    async def overloaded(self, request, context):
        raise Overloaded("come back later", retry_after=1.5)
        yield

    async def bug(self, request, context):
        raise ZeroDivisionError("by nought")
        yield

    async def bad_token(self, request, context):
        yield {"token_ids": [object()]}

    async def bad_reason(self, request, context):
        yield {"finish_reason": "because"}

    async def no_end(self, request, context):
        yield {"token_ids": [1]}

    async def endless(self, request, context):
        while not context.is_stopped():
            self.produced += 1
            yield {"token_ids": [1]}

    async def step(self, request, context):
        for _ in range(1000):
            self.worker.report_step()
        yield {"finish_reason": "stop"}

    async def stuck(self, request, context):
        self.aborted.append("stuck began")
        try:
            await asyncio.Event().wait()
        finally:
            self.aborted.append("stuck ended")
        yield

    async def abort(self, context):
        self.aborted.append(context.id())

    async def control(self, op, arguments):
        if op == "sleep":
            self.sleep_level = arguments["level"]
            return None
        if op == "list_adapters":
            return {"adapters": [{"name": name, "source": "here"} for name in self.aborted]}
        if op == "stop_profile":
            return {"location": f"{self.sleep_level} {self.produced}"}
        return await super().control(op, arguments)

    async def drain(self):
        self.aborted.append("drained")

    async def cleanup(self):
        logger.info("cleaned")


if __name__ == "__main__":
    run(FullEngine)
