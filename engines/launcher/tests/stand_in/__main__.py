"""A server with the documented and recorded API of vLLM, SGLang, TensorRT-LLM or llama.cpp, and a tiny model that samples.

For the launcher's tests only: python3 stand_in API [--fault NAME] [--report PORT] [...the launcher's own flags]
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time

from completions import Completions
from controls import SglangControls, TrtllmControls, VllmControls
from kv import Rank
from llama import Llama, LlamaCppPython
from model import Refused
from sglang import Sglang

CONTEXT = 256

# With the fault "poison", a request for this number of tokens crashes the server before the first token.
POISON_TOKENS = 13


# The variable from which each server reads its key; TensorRT-LLM has none.
KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "llama": "LLAMA_API_KEY", "llama_cpp.server": "API_KEY"}


def api_key(args):
    """The key that requests must carry. The server does not start without a key, or with a key that everybody can read."""
    if args.api == "trtllm":
        return None
    if args.api == "sglang":
        assert os.stat(args.config).st_mode & 0o077 == 0
        with open(args.config) as file:
            key = re.fullmatch(r'api-key: "(\w+)"\n', file.read())[1]
    else:
        key = os.environ[KEY_VARIABLES[args.api]]
    assert len(key) >= 32 and not any(key in word for word in sys.argv)
    return key


# The answer of vLLM 0.32.0 after its EngineCore was killed. It is unhealthy then, and exits seconds later.
DEAD_INSIDE = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


# Invalid metrics.
LOAD_FAULTS = {
    "metrics-garbage": 'vllm:num_requests_waiting{ 5\n# TYPE\n}}\x00"\n{"loads": [{]\n# EOF\n# HELP genset_worker_ready a\\nb\n',
    "metrics-huge": 'vllm:many{n="0"} 1.0\n' * 500_000,
    "metrics-hang": None,
}


class Stand:
    def __init__(self, args, api):
        self.args, self.api, self.key = args, api, api_key(args)
        self.healthy_at = time.monotonic() + args.slow_start
        self.report = None
        self.requests = 0
        self.is_dead_inside = False

    async def run(self):
        if self.args.report:
            _, self.report = await asyncio.open_connection("127.0.0.1", self.args.report)
            self.say("pid", os.getpid())
            side_channel = {name: value for name, value in os.environ.items() if name.startswith("VLLM_NIXL_")}
            self.say("start", {"args": sys.argv[1:], "env": side_channel})
        for rank in getattr(self.api, "ranks", ()):
            await rank.listen()
        server = await asyncio.start_server(self.serve, "127.0.0.1", self.args.port, limit=1 << 24)
        print("INFO: listening", flush=True)
        async with server:
            await server.serve_forever()

    def say(self, what, value=None):
        if self.report:
            self.report.write(json.dumps({what: value}).encode() + b"\n")

    async def serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self.dispatch(method, path, headers, body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def dispatch(self, method, path, headers, body, reader, writer):
        try:
            if path == self.api.health:
                is_up = time.monotonic() >= self.healthy_at and self.args.fault != "never-healthy"
                if self.args.fault == "hang" and self.requests > 0:
                    await asyncio.Event().wait()
                if self.args.fault == "deaf" and self.requests > 0:
                    # As if requests took all threads of the HTTP server.
                    raise ConnectionError
                is_up = is_up and not self.is_dead_inside
                await self.api.controls.health()
                return respond(writer, 200 if is_up else 503, {"status": "ok" if is_up else "loading"})
            if self.key and headers.get("authorization") != f"bearer {self.key}":
                raise Refused(401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})
            if method == "GET":
                about_load = path == "/metrics" or path.startswith("/v1/loads")
                if about_load and self.requests > 0 and self.args.fault in LOAD_FAULTS:
                    text = LOAD_FAULTS[self.args.fault]
                    return respond(writer, 200, text or await asyncio.Event().wait())
                return respond(writer, 200, self.api.get(path))
            answer = await self.api.controls.post(path, json.loads(body or b"{}"))
            if answer is not None:
                self.say("control", {"path": path, "body": json.loads(body or b"null")})
                return respond(writer, 200, answer)
            known = self.api.path
            if path not in ([known] if isinstance(known, str) else known):
                raise Refused(404, {"detail": "Not Found"})
            self.requests += 1
            self.say("request", {"path": path, "headers": headers, "body": json.loads(body)})
            await self.stream(path, headers, json.loads(body), reader, writer)
        except Refused as refused:
            respond(writer, refused.status, refused.body, refused.headers)

    async def stream(self, path, headers, body, reader, writer):
        fault = self.args.fault
        if fault and fault.startswith("status-"):
            message = {"error": {"message": "no", "type": "x", "code": None}}
            raise Refused(int(fault[7:]), message, [("retry-after", "7")])
        if self.is_dead_inside:
            raise Refused(500, DEAD_INSIDE)
        if fault == "poison" and body.get("max_tokens") == POISON_TOKENS:
            print("ERROR: the device is gone", file=sys.stderr, flush=True)
            os._exit(7)
        begun = False
        sent = 0

        async def pace():
            await asyncio.sleep(self.args.delay)
            if fault == "exit" and sent == 3:
                print("ERROR: the device is gone", file=sys.stderr, flush=True)
                os._exit(7)
            if fault == "hang" and sent == 3:
                await asyncio.Event().wait()

        def chunk(data):
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        async def send(event):
            nonlocal begun, sent
            if not begun:
                begun = True
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
            text = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {text}\n\n".encode()
            sent += 1
            if fault == "garbage" and sent == 3:
                data = b"data: {\"choices\": [{]\n\n"
            elif fault == "half" and sent == 3:
                chunk(data[: len(data) // 2])
                writer.write(b"0\r\n\r\n")
                raise ConnectionError
            elif fault == "early-end" and sent == 3:
                writer.write(b"0\r\n\r\n")
                raise ConnectionError
            elif fault == "error-event" and sent == 3:
                data = b'data: {"error": {"message": "out of blocks", "type": "x", "code": 503}}\n\n'
            elif fault == "dies-inside" and sent == 3:
                self.is_dead_inside = True
                data = f"data: {json.dumps(DEAD_INSIDE)}\n\n".encode()
            elif fault == "odd-token" and sent == 3:
                data = data.replace(b'_ids": [', b'_ids": [5000, ', 1)
            chunk(data)
            await writer.drain()

        work = asyncio.ensure_future(self.api.answer(path, headers, body, pace, send))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            self.say("cancelled", sent)
            return
        work.result()
        writer.write(b"0\r\n\r\n")
        self.say("finished", sent)


def respond(writer, status, body, headers=()):
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("api")
    parser.add_argument("--fault")
    parser.add_argument("--report", type=int)
    parser.add_argument("--delay", type=float, default=0.001)
    parser.add_argument("--slow-start", type=float, default=0.0)
    parser.add_argument("--incremental", action="store_true")
    parser.add_argument("--say")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--port", type=int)
    parser.add_argument("--config")
    parser.add_argument("--kv-transfer-config")
    parser.add_argument("--kv-events-config", default="{}")
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--profiler-config", default="{}")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--lora-modules", nargs="*", default=[])
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    args, _ = parser.parse_known_args()
    for step in range(3):
        print(f"INFO: loading shard {step + 1} of 3", file=sys.stderr, flush=True)
    if args.fault == "exit-at-start":
        print("ERROR: no GPU here", file=sys.stderr, flush=True)
        sys.exit(3)
    apis = {
        "vllm": lambda: Completions(args.context, [Rank(number, args) for number in range(args.data_parallel_size)]),
        "trtllm": lambda: Completions(args.context),
        "sglang": lambda: Sglang(args.context, args),
        "llama": lambda: Llama(args.context, args.say, args.metrics),
        "llama_cpp.server": lambda: LlamaCppPython(args.context),
    }
    api = apis[args.api]()
    controls = {"vllm": VllmControls, "sglang": SglangControls, "trtllm": TrtllmControls}.get(args.api)
    if controls:
        api.controls = controls(args, api)
    asyncio.run(Stand(args, api).run())


if __name__ == "__main__":
    main()
