"""The number of requests that a handler is given at once, without the native module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from test_handler import FakeBridge, FakeCall

from genset._bridge import Bridge
from genset._handler import PROBE_HEADER, Answering, Plain
from genset._places import Places


class Canary(FakeCall):
    """A canary of the worker."""

    headers = {PROBE_HEADER: "canary"}


class Scene:
    """A handler that yields an item and ends on command, with the requests inside it."""

    def __init__(self, places: int, idle_timeout_s: float = 0.0) -> None:
        self.inside: list[str] = []
        self.most = 0
        self._items: dict[str, asyncio.Queue[str | None]] = {}
        self._bridge = FakeBridge()
        self._answering = Answering(
            cast(Bridge, self._bridge), "e", self._handle, Plain("e"), places=Places("e", places, idle_timeout_s)
        )

    async def _handle(self, name: str) -> AsyncGenerator[str, None]:
        self.inside.append(name)
        self.most = max(self.most, len(self.inside))
        try:
            while (item := await self._items[name].get()) is not None:
                yield item
        finally:
            self.inside.remove(name)

    def call(self, name: str, kind: type[FakeCall] = FakeCall, deadline_ms: int | None = None) -> FakeCall:
        call = kind(name)
        # One answer each.
        call.id, call.deadline_ms = len(self._items) + 1, cast(None, deadline_ms)
        self._items[name] = asyncio.Queue()
        self._answering.on_call(cast(Any, call))
        return call

    async def tell(self, name: str, *items: str | None) -> None:
        for item in items:
            self._items[name].put_nowait(item)
        await self.settle()

    async def settle(self) -> None:
        """Runs the loop until only blocked tasks remain."""
        for _ in range(20):
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._bridge.tell_stopped()


def test_a_canary_that_finds_all_places_taken_is_refused() -> None:
    async def main() -> None:
        scene = Scene(2)
        scene.call("a")
        await scene.settle()
        alone = scene.call("one place", Canary)
        await scene.tell("one place", None)
        assert alone.ended == [None]
        scene.call("b")
        await scene.settle()
        refused = scene.call("no place", Canary)
        await scene.settle()
        assert refused.error()["kind"] == "overloaded"
        assert (scene.inside, scene.most) == (["a", "b"], 2)
        # Nobody waits for a stopped request.
        scene.stop()
        scene.call("after", Canary)
        await scene.settle()
        assert "after" in scene.inside

    asyncio.run(main())


def test_a_request_waits_for_the_canary_in_the_last_place() -> None:
    async def main() -> None:
        scene = Scene(1)
        canary = scene.call("canary", Canary)
        await scene.settle()
        call = scene.call("a")
        await scene.settle()
        assert scene.inside == ["canary"]
        await scene.tell("canary", "item", None)
        assert canary.ended == [None] and scene.inside == ["a"]
        await scene.tell("a", None)
        assert call.ended == [None] and scene.most == 1

    asyncio.run(main())


@pytest.mark.parametrize(("idle_timeout_s", "limit_s"), [(0.0, 600), (120.0, 120)])
def test_a_full_handler_that_gives_nothing_is_probed_once_its_requests_must_have_ended(
    idle_timeout_s: float, limit_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        now_s = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        scene = Scene(1, idle_timeout_s)
        numbers = iter(range(100))

        async def is_refused() -> bool:
            name = f"canary {next(numbers)}"
            canary = scene.call(name, Canary)
            await scene.settle()
            if name in scene.inside:
                await scene.tell(name, None)
                return False
            assert canary.error()["kind"] == "overloaded"
            return True

        scene.call("a", deadline_ms=600_000)
        await scene.settle()
        assert await is_refused()
        # More requests arrive, and are as silent.
        now_s += limit_s - 1
        scene.stop()
        scene.call("b", deadline_ms=600_000)
        await scene.settle()
        assert await is_refused()
        now_s += 1
        assert not await is_refused()
        # One item, and the handler counts as alive again.
        await scene.tell("b", "item")
        assert await is_refused()

    asyncio.run(main())
