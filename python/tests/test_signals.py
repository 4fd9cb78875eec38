"""What `@worker` does with signals, without the native module."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import cast

import pytest

from genset._bridge import Bridge
from genset.runtime import Runtime, _run, _told_of_signals


class FakeBridge:
    """A runtime that leaves its fleet at once."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.node = SimpleNamespace(new_instance_id=lambda: 1, shutdown=lambda op: None)

    def operation(self, begin: Callable[[int], None]) -> asyncio.Future[int | None]:
        begin(1)
        future: asyncio.Future[int | None] = self.loop.create_future()
        future.set_result(None)
        return future

    def close(self) -> None:
        pass


def test_a_signal_ends_a_function_that_goes_on_after_its_own_shutdown() -> None:
    async def main() -> None:
        runtime = Runtime(cast(Bridge, FakeBridge()))

        async def function() -> None:
            await runtime.shutdown()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()

        running = asyncio.ensure_future(_run(runtime, function()))
        done, _ = await asyncio.wait([running], timeout=30)
        assert done, "it goes on"
        assert running.result() is None

    asyncio.run(main())


def test_a_second_signal_ends_a_function_that_blocks_the_loop() -> None:
    async def main() -> None:
        async def function() -> None:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it goes on")

        await _run(Runtime(cast(Bridge, FakeBridge())), function())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


def test_a_shutdown_that_is_not_awaited_drains_too() -> None:
    async def main() -> None:
        runtime = Runtime(cast(Bridge, FakeBridge()))
        loop = asyncio.get_running_loop()

        async def function() -> None:
            # The program's own handler, in place of the package's.
            loop.add_signal_handler(signal.SIGTERM, lambda: runtime.shutdown().close())
            signal.raise_signal(signal.SIGTERM)
            while not runtime.is_draining:
                await asyncio.sleep(0)

        await asyncio.wait_for(_run(runtime, function()), 30)

    asyncio.run(main())


def drain_two() -> None:
    async def main() -> None:
        runtimes = [Runtime(cast(Bridge, FakeBridge())) for _ in range(2)]
        running = [asyncio.ensure_future(_run(each, asyncio.Event().wait())) for each in runtimes]
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGTERM)
        _, going_on = await asyncio.wait(running, timeout=30)
        assert not going_on
        assert all(each.is_draining for each in runtimes)

    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_drains_all_programs_of_a_loop() -> None:
    drain_two()


def test_a_program_whose_loop_was_closed_is_told_of_no_signal() -> None:
    told: list[str] = []

    async def begin() -> AbstractContextManager[None]:
        program = _told_of_signals(asyncio.get_running_loop(), told.append)
        program.__enter__()
        return program

    loop = asyncio.new_event_loop()
    program = loop.run_until_complete(begin())
    loop.close()
    try:
        drain_two()
        assert not told
    finally:
        program.__exit__(None, None, None)
