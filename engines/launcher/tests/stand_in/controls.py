"""Operations: the routes of vLLM 0.32.0 and SGLang 0.5.23, available under the same conditions. The fault "old" is a vLLM from before
level 0 of sleep became a pause; it does not report whether it cleared its prefix cache. The routes for adapters are written from vLLM's
source, and that for KV events from TensorRT-LLM's; they were not recorded."""

import asyncio
import json
import os
import sys
import time
import zlib

from model import Refused


class Controls:
    """For a server without operations."""

    # The ranks of the adapters, by name. Answers depend on the rank.
    adapters = {}

    async def health(self):
        pass

    def get(self, path):
        return None

    async def post(self, path, body):
        return None

    async def awake(self):
        """Waits until the server is awake."""


def die(why):
    """Fails like an assertion in the scheduler."""
    print(f"AssertionError: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def failed(status, message, kind="InternalServerError"):
    return Refused(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


def is_set(variable):
    return os.environ.get(variable, "0").strip().lower() in ("1", "true")


# The routes for adapters, if the environment allows them.
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

# The largest rank that vLLM takes unless it is told another.
MAX_LORA_RANK = 16


def named(module):
    """Name and folder in an argument of `--lora-modules`."""
    if module.startswith("{"):
        module = json.loads(module)
        return module["name"], module["path"]
    return module.split("=", 1)


class VllmControls(Controls):
    def __init__(self, args, api):
        self.api, self.asleep, self.is_profiling = api, set(), False
        self.has_memory, self.fault = args.enable_sleep_mode, args.fault
        self.profiler = json.loads(args.profiler_config).get("profiler")
        self.is_dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        self.runs = asyncio.Event()
        self.runs.set()
        self.has_weights = True
        self.updates_loras, self.has_lora, self.adapters = is_set("VLLM_ALLOW_RUNTIME_LORA_UPDATING"), args.enable_lora, {}
        for name, folder in map(named, args.lora_modules):
            try:
                self.load(name, folder)
            except Refused as refused:
                sys.exit(f"ValueError: {refused.body['error']['message']}")

    def load(self, name, folder):
        if name in self.adapters:
            again = "If you want to load the adapter in place, set 'load_inplace' to True."
            raise failed(400, f"The lora adapter '{name}' has already been loaded. {again}", "InvalidUserInput")
        if not self.has_lora:
            raise failed(500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA.")
        try:
            with open(os.path.join(folder, "adapter_config.json")) as file:
                rank = json.load(file)["r"]
        except FileNotFoundError:
            raise failed(404, f"Loading lora {name} failed: No adapter found for {folder}", "NotFoundError") from None
        if rank > MAX_LORA_RANK:
            raise failed(500, f"Call to add_lora method failed: LoRA rank {rank} is greater than max_lora_rank {MAX_LORA_RANK}.")
        self.adapters[name] = rank
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name):
        if name not in self.adapters:
            raise failed(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        if self.fault == "unload-fails":
            self.fault = None
            raise failed(500, f"Failed to remove lora adapter '{name}' from the engine.")
        del self.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def awake(self):
        await self.runs.wait()
        if not self.has_weights:
            die("the real one answers garbage")

    def get(self, path):
        is_release = self.is_dev and path == "/release_kv_cache_memory" and self.fault != "old"
        if is_release or (self.updates_loras and path in (LOAD, UNLOAD)):
            raise Refused(405, {"detail": "Method Not Allowed"})
        return {"is_sleeping": not self.runs.is_set()} if self.is_dev and path == "/is_sleeping" else None

    async def post(self, path, body):
        if path in ("/start_profile", "/stop_profile") and self.profiler:
            self.is_profiling = path == "/start_profile"
            return ""
        if self.updates_loras and path == LOAD:
            return self.load(body["lora_name"], body["lora_path"])
        if self.updates_loras and path == UNLOAD:
            return self.unload(body["lora_name"])
        return self.dev(*path.partition("?")[::2]) if self.is_dev else None

    def dev(self, path, query):
        if path == "/sleep":
            # Its engine drops requests without an answer.
            self.runs.clear()
            if query != "level=0":
                if self.fault == "sleep-fails":
                    raise failed(500, "CUDA error")
                self.reset()
                self.asleep |= {"weights", "kv_cache"} if self.has_memory else set()
            elif self.fault == "old":
                self.reset()
                self.has_weights = False
            return {"status": "sleeping", "level": int(query[-1])}
        if path == "/release_kv_cache_memory" and self.fault != "old":
            if self.runs.is_set() or self.asleep:
                raise failed(500, "release_kv_cache_memory() requires a completed pause first")
            self.reset()
            self.asleep.add("kv_cache")
            return {"status": "kv_cache_released"}
        if path == "/wake_up":
            if self.fault == "wake-fails":
                self.fault = None
                raise failed(500, "CUDA out of memory")
            self.asleep.clear()
            self.runs.set()
            return {"status": "awake", "tags": None}
        if path == "/reset_prefix_cache":
            is_held = any(rank.scheduled.running for rank in self.api.ranks)
            success = not is_held or query == "reset_running_requests=true"
            if is_held and success and self.fault == "transfers":
                raise failed(500, "Failed to reset KV cache even when all the running requests are preempted")
            if success:
                self.reset()
            return "" if self.fault == "old" else {"success": success}
        return None

    def reset(self):
        """Its event is sent with the next request's."""
        for rank in self.api.ranks:
            rank.blocks.clear()


class TrtllmControls(Controls):
    """The KV events of TensorRT-LLM: each is given once. Its blocks are those of the prompts, and never removed."""

    def __init__(self, args, api):
        self.api, self.told = api, 0

    async def post(self, path, body):
        if path != "/kv_cache_events":
            return None
        prompts = self.api.seen[self.told :]
        events = [self.stored(number, prompt) for number, prompt in enumerate(prompts, self.told)]
        self.told += len(prompts)
        return events

    def stored(self, number, prompt):
        blocks = [
            {
                "type": "stored_block",
                "block_hash": zlib.crc32(repr(prompt[: start + 32]).encode()),
                "tokens": [{"type": "unique_token", "token_id": id, "token_extra_id": 0} for id in prompt[start : start + 32]],
                "cache_level": 0,
                "priority": 35,
            }
            for start in range(0, len(prompt), 32)
        ]
        data = {"type": "stored", "parent_hash": None, "blocks": blocks}
        return {"event_id": number, "data": data, "window_size": self.api.context}


class SglangControls(Controls):
    def __init__(self, args, api):
        self.api, self.released, self.is_profiling = api, set(), False
        self.fault = args.fault
        self.options = {name: getattr(args, name) for name in ("enable_memory_saver", "enable_weights_cpu_backup")}

    async def health(self):
        """A request of one token."""
        await self.awake()

    async def awake(self):
        if self.released:
            die("an illegal memory access was encountered")

    def is_idle(self):
        return not any(scheduled.running or scheduled.waiting for scheduled in self.api.scheduled)

    def flush(self):
        for blocks in self.api.ranks:
            blocks.clear()

    async def post(self, path, body):
        path, _, query = path.partition("?")
        if path == "/flush_cache":
            until = time.monotonic() + float(query.removeprefix("timeout=") or 0)
            while not self.is_idle():
                if time.monotonic() >= until:
                    raise Refused(400, "Timed out waiting for idle state.")
                await asyncio.sleep(0.01)
            self.flush()
            return "Cache flushed.\n"
        if path == "/release_memory_occupation":
            if not self.is_idle():
                die("release_memory_occupation should be called only when server is idle.")
            self.released |= set(body["tags"])
            if "kv_cache" in body["tags"]:
                self.flush()
            return "null"
        if path == "/resume_memory_occupation":
            for tag in body["tags"]:
                if tag not in self.released:
                    die(f"KeyError: {tag}")
                self.released.remove(tag)
            return "null"
        if path == "/update_weights_from_disk":
            updated = self.update(body["model_path"])
            if self.fault == "update-lost":
                raise ConnectionError
            return updated
        if path in ("/start_profile", "/stop_profile"):
            begins = path == "/start_profile"
            if begins == self.is_profiling:
                raise Refused(500, "Internal Server Error")
            self.is_profiling = begins
            return "Start profiling.\n" if begins else "Stop profiling. This will take some time.\n"
        return None

    def update(self, folder):
        if not os.path.isdir(folder):
            message = f"Failed to get weights iterator: {folder} is not a local folder."
            raise Refused(400, {"success": False, "message": message, "num_paused_requests": 0})
        if not self.is_idle():
            message = "Weights were updated, but the cache was not flushed because requests are still running or queued."
            raise Refused(400, {"success": False, "message": message, "num_paused_requests": 0})
        self.flush()
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
