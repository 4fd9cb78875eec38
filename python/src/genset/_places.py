"""The places of a model's handler: how many requests it is given at once. `genset._handler` takes one before each.

The worker in the native module admits no more requests than there are places. Its canary comes in addition, so here it takes a place
like any request, and is refused if none is free: a handler that works is alive.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from genset.exceptions import Overloaded

if TYPE_CHECKING:
    from genset._handler import Answer


class Places:
    """The places of one handler."""

    def __init__(self, endpoint: str, count: int, idle_timeout_s: float) -> None:
        """`idle_timeout_s` is the longest silence inside an answer; 0 for no limit."""
        self._endpoint = endpoint
        self._count = count
        self._idle_timeout_s = idle_timeout_s or math.inf
        self.given_before = 0
        """Items of answers that have ended."""
        self._given = -1
        self._busy_until_s = 0.0

    async def take(self, answer: Answer, answers: Collection[Answer]) -> None:
        """Returns when the handler may be given a request. `answers` are all in progress, including its own. An answer holds its place until it
        ends or is stopped.

        Raises `Overloaded` for a canary that finds none.
        """
        if len(answers) <= self._count:
            return
        others = [each for each in answers if each is not answer and not each.stream.is_stopped]
        if len(others) < self._count:
            return
        if not answer.is_probe:
            # The worker counts all requests except probes.
            probes = [each.task for each in others if each.is_probe and each.task is not None]
            if probes:
                await asyncio.wait(probes)
        elif self._is_busy(others, self.given_before + sum(each.stream.sent for each in answers)):
            raise Overloaded(f"the handler of {self._endpoint} has the {self._count} requests that it is given at once")

    def _is_busy(self, others: Collection[Answer], given: int) -> bool:
        """Whether a full handler counts as alive: the requests that ran at its last item may still run. When all of them must be over and no item
        came, the handler may hang, however many requests wait for it, and the canary finds out."""
        now_s = asyncio.get_running_loop().time()
        if given != self._given:
            self._given = given
            self._busy_until_s = min(now_s + self._idle_timeout_s, max(each.deadline_s for each in others))
        return now_s < self._busy_until_s
