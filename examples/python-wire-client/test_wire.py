"""Tests the client against a real worker: every rule of docs/wire-protocol.md that a caller can observe."""

import asyncio
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import msgpack

from genset_discovery import Instance
from genset_wire import Connection, Disconnected, Kind, Refused, RemoteError, Stream, encode_frame, read_frame
from worker_process import MODEL_FOLDER, WorkerProcess

SECRET = "correct horse battery staple"
VOCABULARY = 1000  # The sample engine's.
PATIENCE = 60  # Seconds after which a test fails.


def generate_request(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"model": "tiny-chat", "input": {"tokens": prompt}, "stop": {"max_tokens": max_tokens}}


def expected_tokens(last: int, count: int) -> list[int]:
    """The sample engine continues from the prompt's last token."""
    return [(last + step) % VOCABULARY for step in range(1, count + 1)]


async def rest_of(stream: Stream) -> tuple[list[int], dict[str, Any]]:
    """Reads the rest: the remaining tokens, and the terminal item."""
    tokens: list[int] = []
    finished = None
    async for item in stream:
        assert finished is None, f"{item} after the terminal"
        finished = item.get("finished")
        tokens += (finished["last"] if finished else item["tokens"])["token_ids"]
    assert finished is not None, "no terminal"
    return tokens, finished


async def until(condition) -> None:
    """Waits until the condition holds."""
    while not condition():
        await asyncio.sleep(0.005)


class WireTest(unittest.IsolatedAsyncioTestCase):
    """A worker with a connection to it."""

    flags: tuple[str, ...] = ()

    def setUp(self) -> None:
        self.worker = self.enterContext(WorkerProcess(*self.flags, secret=SECRET))

    async def asyncSetUp(self) -> None:
        self.instances = self.worker.instances()
        self.generate = self.instances["generate"]
        # A hanging test must fail.
        await self.enterAsyncContext(asyncio.timeout(PATIENCE))
        self.connection = await self.enterAsyncContext(await self.connect())

    async def connect(self, secret: str | None = SECRET) -> Connection:
        return await Connection.open(self.generate.host, self.generate.port, secret.encode() if secret else None)

    async def call(self, instance: Instance, request: Any, **options: Any) -> Stream:
        stream = await self.connection.call(instance.endpoint, instance.id, request, **options)
        return await self.enterAsyncContext(stream)


class Calls(WireTest):
    async def test_tokens_stream_and_the_terminal_counts_them(self) -> None:
        tokens, finished = await rest_of(await self.call(self.generate, generate_request([5, 6, 7], 200)))
        self.assertEqual(tokens, expected_tokens(7, 200))
        self.assertEqual(finished["reason"], "length")
        self.assertEqual(finished["usage"], {"prompt_tokens": 3, "completion_tokens": 200})

    async def test_a_stop_token_ends_the_stream_and_is_named(self) -> None:
        request = generate_request([7], 100)
        request["stop"]["stop_token_ids"] = [10]
        tokens, finished = await rest_of(await self.call(self.generate, request))
        self.assertEqual((tokens, finished["reason"], finished["stop_token"]), ([8, 9], "stop", 10))

    async def test_a_small_window_streams_everything_in_order(self) -> None:
        stream = await self.call(self.generate, generate_request([0], 50), window=2)
        tokens, _ = await rest_of(stream)
        self.assertEqual(tokens, expected_tokens(0, 50))

    async def test_a_slow_reader_gets_its_window_and_holds_up_nobody(self) -> None:
        slow = await self.call(self.generate, generate_request([0], 100), window=4)
        await until(lambda: slow.unread == 4)
        for _ in range(3):
            tokens, _ = await rest_of(await self.call(self.generate, generate_request([9], 50)))
            self.assertEqual(tokens, expected_tokens(9, 50))
        self.assertEqual(slow.unread, 4)
        tokens, _ = await rest_of(slow)
        self.assertEqual(tokens, expected_tokens(0, 100))

    async def test_two_calls_share_the_connection_and_do_not_mix(self) -> None:
        first = await self.call(self.generate, generate_request([100], 300), window=8)
        second = await self.call(self.generate, generate_request([500], 300), window=8)
        tokens: dict[Stream, list[int]] = {first: [], second: []}
        for _ in range(300):  # One of each in turn: neither waits for the other's end.
            for stream, read in tokens.items():
                read += (await anext(stream))["tokens"]["token_ids"]
        self.assertEqual(tokens[first], expected_tokens(100, 300))
        self.assertEqual(tokens[second], expected_tokens(500, 300))

    async def test_requests_the_worker_refuses_fail_with_their_kind_and_field(self) -> None:
        request = {**generate_request([1], 1), "sampling": {"temperature": -3.0}}
        with self.assertRaises(RemoteError) as caught:
            await anext(await self.call(self.generate, request))
        error = caught.exception
        self.assertEqual((error.kind, error.details["field"]), ("invalid_argument", "temperature"))
        self.assertFalse(error.is_retryable)

    async def test_a_request_of_another_type_is_refused_and_the_connection_goes_on(self) -> None:
        with self.assertRaises(RemoteError) as caught:
            await anext(await self.call(self.generate, ["no", "request"]))
        self.assertEqual(caught.exception.kind, "invalid_argument")
        await rest_of(await self.call(self.generate, generate_request([1], 1)))

    async def test_unknown_endpoints_and_instances_are_refused_as_not_there(self) -> None:
        for endpoint, instance in [
            (self.generate.sibling("no_such_endpoint"), self.generate.id),
            (self.generate.endpoint, self.generate.id ^ 1),
        ]:
            stream = await self.connection.call(endpoint, instance, None)
            with self.assertRaises(RemoteError) as caught:
                await anext(stream)
            self.assertEqual(caught.exception.kind, "cannot_connect")
            self.assertTrue(caught.exception.is_retryable)

    async def test_frames_of_unknown_kinds_are_ignored(self) -> None:
        self.connection._writer.write(encode_frame(99, 7, b"of tomorrow"))
        tokens, _ = await rest_of(await self.call(self.generate, generate_request([1], 3)))
        self.assertEqual(tokens, [2, 3, 4])

    async def test_a_frame_against_the_protocol_ends_the_connection_with_a_reason(self) -> None:
        self.connection._writer.write(encode_frame(Kind.ITEM, 1, b"\xc0"))
        await self.connection.closed()
        with self.assertRaises(Disconnected) as caught:
            await self.call(self.generate, generate_request([1], 1))
        reason = caught.exception.__cause__
        assert isinstance(reason, Refused), reason
        self.assertEqual(reason.code, "protocol")

    async def test_the_command_line_finds_the_worker_and_prints_its_tokens(self) -> None:
        secret_file = self.worker.directory / "secret"
        command = [sys.executable, "generate.py", "--discovery", str(self.worker.discovery)]
        run = await asyncio.create_subprocess_exec(
            *command,
            f"--secret-file={secret_file}",
            "--max-tokens=3",
            "41",
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        tokens, usage = await run.communicate()
        self.assertEqual(run.returncode, 0, usage)
        self.assertEqual(tokens.split(), [b"42", b"43", b"44"])
        self.assertIn(b"length: 1 prompt tokens, 3 completion tokens", usage)


class OtherEndpoints(WireTest):
    async def test_artifacts_arrive_by_hash(self) -> None:
        assert self.generate.card is not None
        artifacts = self.generate.card["artifacts"]
        self.assertIn("tokenizer.json", [artifact["name"] for artifact in artifacts])
        for artifact in artifacts:
            stream = await self.call(self.instances["artifacts"], {"blake3": artifact["blake3"]})
            content = b"".join([chunk async for chunk in stream])
            self.assertEqual(len(content), artifact["size"])
            self.assertEqual(content, (MODEL_FOLDER / artifact["name"]).read_bytes())

    async def test_an_artifact_that_is_not_there_is_not_found(self) -> None:
        with self.assertRaises(RemoteError) as caught:
            await anext(await self.call(self.instances["artifacts"], {"blake3": "0" * 64}))
        self.assertEqual(caught.exception.kind, "not_found")

    async def test_load_is_told_at_once(self) -> None:
        load = await anext(await self.call(self.instances["load"], None))
        fields = {"running_requests", "waiting_requests", "kv_used_blocks", "kv_total_blocks", "max_requests"}
        self.assertEqual(load.keys(), fields)

    async def test_kv_events_begin_with_a_snapshot(self) -> None:
        item = await anext(await self.call(self.instances["kv_events"], None))
        self.assertEqual(item, {"snapshot": {"last_event_id": 0, "blocks": []}})

    async def test_control_refuses_what_the_engine_lacks(self) -> None:
        with self.assertRaises(RemoteError) as caught:
            await anext(await self.call(self.instances["control"], {"op": "sleep", "level": "weights"}))
        self.assertEqual(caught.exception.kind, "unsupported")


class LongCalls(WireTest):
    """Answers that would take minutes if they were not ended."""

    flags = ("--token-delay-ms=20",)

    async def test_a_cancelled_call_ends_with_its_terminal(self) -> None:
        stream = await self.call(self.generate, generate_request([0], 30_000))
        first = [(await anext(stream))["tokens"]["token_ids"] for _ in range(3)]
        self.assertEqual(first, [[1], [2], [3]])
        stream.cancel()
        tokens, finished = await rest_of(stream)
        self.assertEqual(finished["reason"], "cancelled")
        self.assertEqual(finished["usage"]["completion_tokens"], 3 + len(tokens))

    async def test_a_call_cancelled_for_another_reason_ends_with_its_error(self) -> None:
        for reason, kind in [
            ("deadline", "deadline_exceeded"),
            ("shutdown", "engine_shutdown"),
            ("engine_dead", "disconnected"),
        ]:
            with self.subTest(reason):
                stream = await self.call(self.generate, generate_request([0], 30_000))
                await anext(stream)
                stream.cancel(reason)
                with self.assertRaises(RemoteError) as caught:
                    await rest_of(stream)
                self.assertEqual(caught.exception.kind, kind)

    async def test_a_deadline_ends_the_call(self) -> None:
        stream = await self.call(self.generate, generate_request([0], 30_000), deadline_ms=300)
        with self.assertRaises(RemoteError) as caught:
            await rest_of(stream)
        self.assertEqual(caught.exception.kind, "deadline_exceeded")

    async def test_a_worker_that_shuts_down_finishes_what_is_open_and_takes_no_more(self) -> None:
        stream = await self.call(self.generate, generate_request([0], 20))
        await anext(stream)
        self.worker.terminate()
        tokens, finished = await rest_of(stream)
        self.assertEqual((tokens, finished["reason"]), (expected_tokens(1, 19), "length"))
        await self.connection.closed()
        self.assertEqual(self.connection.leaving, {self.generate.id})
        self.assertTrue(self.connection.is_going_away)
        self.assertEqual(self.worker.wait(), 0, self.worker.log)
        self.assertEqual(self.worker.instances(), {})

    async def test_a_worker_that_is_killed_ends_its_calls_as_disconnected(self) -> None:
        stream = await self.call(self.generate, generate_request([0], 30_000))
        await anext(stream)
        self.worker.kill()
        with self.assertRaises(Disconnected):
            await rest_of(stream)


class OnePlace(WireTest):
    """A worker that runs one request at a time, and queues none."""

    flags = ("--token-delay-ms=20", "--max-running-requests=1", "--max-waiting-requests=0")

    async def test_a_call_that_is_left_frees_its_place_in_the_worker(self) -> None:
        held = await self.call(self.generate, generate_request([0], 30_000))
        await anext(held)
        with self.assertRaises(RemoteError) as caught:
            await anext(await self.call(self.generate, generate_request([0], 1)))
        self.assertEqual(caught.exception.kind, "overloaded")
        held.leave()
        await self.served()

    async def served(self) -> None:
        while True:
            try:
                await rest_of(await self.call(self.generate, generate_request([0], 1)))
                return
            except RemoteError as error:
                self.assertEqual(error.kind, "overloaded")
                await asyncio.sleep(0.01)


class Secrets(WireTest):
    async def test_a_wrong_or_missing_secret_is_refused_with_a_reason(self) -> None:
        for secret in ["another secret, as long", None]:
            with self.assertRaises(Refused) as caught:
                await self.connect(secret)
            self.assertEqual(caught.exception.code, "unauthorized")
            self.assertIn("secret", str(caught.exception))

    async def test_white_space_around_the_secret_does_not_count(self) -> None:
        async with await self.connect(f"\n  {SECRET}\t\r\n"):
            pass

    async def test_no_common_version_is_refused_with_a_reason(self) -> None:
        reader, writer = await asyncio.open_connection(self.generate.host, self.generate.port)
        hello = {"version": 9, "min_version": 8, "max_frame_bytes": 1 << 20}
        writer.write(encode_frame(Kind.HELLO, 0, msgpack.packb(hello)))
        kinds = []
        while True:
            kind, _, payload = await read_frame(reader, 4096)
            kinds.append(kind)
            if kind == Kind.GO_AWAY:
                break
        self.assertEqual(kinds, [Kind.HELLO, Kind.GO_AWAY])
        self.assertEqual(msgpack.unpackb(payload)["code"], "version")
        self.assertEqual(await reader.read(), b"")
        writer.close()


class KeepAlive(unittest.IsolatedAsyncioTestCase):
    """A worker without a secret, so that a test can exchange single frames with it."""

    def setUp(self) -> None:
        self.bare = self.enterContext(WorkerProcess()).instances()["generate"]

    async def asyncSetUp(self) -> None:
        # A hanging test must fail.
        await self.enterAsyncContext(asyncio.timeout(PATIENCE))

    async def test_pings_are_answered_with_what_they_carry(self) -> None:
        reader, writer = await asyncio.open_connection(self.bare.host, self.bare.port)
        hello = {"version": 1, "min_version": 1, "max_frame_bytes": 1 << 20}
        writer.write(encode_frame(Kind.HELLO, 0, msgpack.packb(hello)) + encode_frame(Kind.PING, 0, b"echo"))
        frames = [await read_frame(reader, 4096) for _ in range(2)]
        self.assertEqual([kind for kind, _, _ in frames], [Kind.HELLO, Kind.PONG])
        self.assertEqual(frames[1], (Kind.PONG, 0, b"echo"))
        writer.close()

    async def test_a_caller_that_answers_no_ping_is_given_up(self) -> None:
        reader, writer = await asyncio.open_connection(self.bare.host, self.bare.port)
        hello = {"version": 1, "min_version": 1, "max_frame_bytes": 1 << 20}
        writer.write(encode_frame(Kind.HELLO, 0, msgpack.packb(hello)))
        kinds = []
        with self.assertRaises(asyncio.IncompleteReadError):
            while True:
                kinds.append((await read_frame(reader, 4096))[0])
        self.assertEqual(kinds[:2], [Kind.HELLO, Kind.PING])
        writer.close()

    async def test_a_connection_that_only_answers_pings_lives(self) -> None:
        # The worker drops a silent caller after three pings; this one sends no pings itself.
        async with await Connection.open(
            self.bare.host, self.bare.port, ping_interval=PATIENCE, peer_timeout=PATIENCE
        ) as connection:
            pings = self.count(connection, Kind.PING)
            await until(lambda: len(pings) == 5)
            await rest_of(await connection.call(self.bare.endpoint, self.bare.id, generate_request([1], 1)))

    def count(self, connection: Connection, wanted: Kind) -> list[int]:
        """Returns a list that grows by one with every frame of that kind."""
        seen: list[int] = []
        take = connection._take

        def counting(kind: int, id: int, payload: bytes) -> None:
            if kind == wanted:
                seen.append(id)
            take(kind, id, payload)

        connection._take = counting  # type: ignore[method-assign]
        return seen


if __name__ == "__main__":
    unittest.main()
