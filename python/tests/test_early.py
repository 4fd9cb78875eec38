"""What an engine publishes before its worker is listed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from genset._frames import pack
from genset.backend import worker
from genset.engine import Event


async def published(*events: Event) -> list[Any]:
    """What remains of events that were published before the worker was listed."""
    early = worker._Early()
    assert all(early.keep(event, pack(event)) for event in events)
    came: list[Any] = []
    early.end(lambda packed: came.append(msgpack.unpackb(packed)))
    # From now on it keeps nothing.
    assert not early.keep({"load": {}}, b"")
    return came


def stored(block: int) -> Event:
    return {"kv": {"stored": {"parent": None, "blocks": [block]}}}


def test_all_kv_events_arrive_in_order_and_of_the_others_the_last() -> None:
    loads: list[Event] = [{"load": {"running_requests": count}} for count in range(3)]
    series: list[Event] = [{"metrics": [{"name": "a", "value": value}]} for value in (1.0, 2.0)]
    removed: Event = {"kv_rank": {"rank": 1, "data": {"removed": {"blocks": [1]}}}}
    dead: Event = {"dead": {"reason": "the device is lost"}}
    came = asyncio.run(published(*loads, stored(1), series[0], dead, stored(2), removed, series[1]))
    assert came[:3] == [stored(1), stored(2), removed]
    assert came[3:] == [loads[-1], series[-1], dead]


def test_too_many_kv_events_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker, "_KV_EVENTS_KEPT", 3)
    assert asyncio.run(published(*map(stored, range(3)))) == [stored(block) for block in range(3)]
    assert asyncio.run(published(*map(stored, range(4)))) == [{"kv": "cleared"}, stored(3)]
    assert "3 KV events came before the worker was listed" in caplog.text
