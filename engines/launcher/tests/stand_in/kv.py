"""KV blocks of vLLM: a prefix cache with its events, and the connector that sends blocks to other servers."""

import asyncio
import hashlib
import json
import os
import random
import time

from zeromq import Socket, pack

class Blocks:
    """The prefix cache of a rank of vLLM 0.32.0, which is never full here, and its KV events as recorded."""

    def __init__(self, rank, size, config):
        self.rank, self.size, self.known, self.sent = rank, size, set(), []
        # Sent with the next event.
        self.is_cleared = False
        self.sockets = []
        if self.is_on(config):
            paths = [self.path(config[name]) for name in ("endpoint", "replay_endpoint")]
            self.sockets = [Socket(b"PUB", paths[0]), Socket(b"ROUTER", paths[1], self.replay)]

    def is_on(self, config):
        return config.get("enable_kv_cache_events") and config["publisher"] == "zmq"

    def path(self, endpoint):
        """Each rank has its own sockets."""
        assert endpoint.startswith("ipc://")
        if self.rank == 0:
            return endpoint[6:]
        if "inproc" not in endpoint:
            raise ValueError("Invalid endpoint: must contain 'inproc' or 'tcp'")
        return f"{endpoint[6:]}_dp{self.rank}"

    def replay(self, writer, parts):
        start = int.from_bytes(parts[1], "big")
        for number, payload in enumerate(self.sent[start:], start):
            self.sockets[1].send(writer, [b"", b"", number.to_bytes(8, "big"), payload])
        self.sockets[1].send(writer, [b"", b"", b"\xff" * 8, b""])

    def clear(self):
        self.known.clear()
        self.is_cleared = True

    def publish(self, events):
        if self.is_cleared:
            events, self.is_cleared = [{"type": "AllBlocksCleared"}, *events], False
        payload = pack([time.time(), events, self.rank])
        for writer in self.sockets[0].peers if self.sockets else ():
            self.sockets[0].send(writer, [b"", len(self.sent).to_bytes(8, "big"), payload])
        self.sent.append(payload)

    def chain(self, tokens, salt, lora=None):
        """The hashes of the full blocks. They depend on the name of an adapter, not on its weights."""
        hashes, before = [], f"{salt} {lora}"
        for start in range(0, len(tokens) - self.size + 1, self.size):
            digest = hashlib.sha256(f"{before} {tokens[start : start + self.size]}".encode()).digest()
            before = int.from_bytes(digest[-8:], "big")
            hashes.append(before)
        return hashes

    def cached(self, tokens, salt, lora=None):
        """The number of cached tokens. The last token is always computed."""
        chain = self.chain(tokens[:-1], salt, lora)
        return self.size * next((place for place, block in enumerate(chain) if block not in self.known), len(chain))

    def store(self, tokens, salt, lora=None):
        chain = self.chain(tokens, salt, lora)
        first = next((place for place, block in enumerate(chain) if block not in self.known), len(chain))
        if first == len(chain):
            return
        self.known.update(chain)
        parent = chain[first - 1] if first else None
        self.publish([self.stored(chain[first:], parent, tokens[first * self.size : len(chain) * self.size], salt, lora)])

    def stored(self, hashes, parent, tokens, salt, lora):
        salted = [[salt]] if salt and parent is None else []
        keys = salted + [None] * (len(hashes) - len(salted))
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self.size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": lora,
            "extra_keys": [[lora, *(key or [])] for key in keys] if lora else keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


class Connector:
    """NixlConnector's parameters, as recorded from vLLM 0.32.0. Its blocks are a name here, fetched once over a side channel."""

    def __init__(self, config, fault, rank):
        self.role, self.fault = json.loads(config)["kv_role"], fault
        self.host = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        self.port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) + rank
        self.kept = set()

    async def listen(self):
        await asyncio.start_server(self.give, self.host, self.port)

    async def give(self, reader, writer):
        name = (await reader.readline()).decode().strip()
        if name in self.kept:
            self.kept.remove(name)
            writer.write(b"blocks\n")
        writer.close()

    def keep(self, prompt):
        """The transfer parameters in the answer to a prefill."""
        if self.role == "kv_consumer" or self.fault == "no-params":
            return None
        name = f"cmpl-{random.getrandbits(64):016x}-0-{random.getrandbits(32):08x}"
        self.kept.add(name)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 2 + len(prompt) // 128))],
            "remote_engine_id": "d75fd860-0000-4000-8000-000000000000",
            "remote_request_id": name,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(prompt),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    async def fetch(self, params):
        """Fetches the blocks; returns whether that succeeded."""
        if self.fault == "fetch-fails":
            return False
        try:
            reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
        except OSError:
            return False
        writer.write(params["remote_request_id"].encode() + b"\n")
        answer = await reader.readline()
        writer.close()
        return answer == b"blocks\n"


class Scheduled:
    """The running requests with their token counts, and the waiting ones. Each is a task, and is removed when that is done."""

    def __init__(self, most):
        self.most, self.running, self.waiting, self.prompt_tokens = most, {}, [], 0

    async def enter(self, tokens):
        """Waits for a place."""
        task = asyncio.current_task()
        task.add_done_callback(self.leave)
        self.waiting.append(task)
        while len(self.running) >= self.most:
            await asyncio.sleep(0.001)
        self.waiting.remove(task)
        self.prompt_tokens += tokens
        self.hold(tokens)

    def hold(self, tokens):
        self.running[asyncio.current_task()] = tokens

    def leave(self, task):
        self.running.pop(task, None)
        if task in self.waiting:
            self.waiting.remove(task)

    def blocks(self, size):
        """The number of blocks of running requests. Blocks that are only cached count as free."""
        return sum(-(-tokens // size) for tokens in self.running.values())


class Rank:
    """A data-parallel rank of vLLM."""

    def __init__(self, number, args):
        self.blocks = Blocks(number, args.block_size, json.loads(args.kv_events_config))
        self.scheduled = Scheduled(args.max_num_seqs)
        config = args.kv_transfer_config
        self.connector = Connector(config, args.fault, number) if config else None

    async def listen(self):
        for socket in self.blocks.sockets:
            await socket.listen()
        if self.connector:
            await self.connector.listen()
