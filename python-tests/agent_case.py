"""The test case for all agent frameworks: two tools, three conversations, and the expected results.

This is not a test itself. Each `test_agents_*.py` puts one framework's official agent between a conversation and a server of the
built-in model that was started without flags. `ai_sdk/agent.mjs` has the same tools in JavaScript.
"""

import asyncio
import os
from dataclasses import dataclass

import pytest

from genset_server import GensetServer

# Nothing is sent to any other host than the server.
os.environ["LANGSMITH_TRACING"] = os.environ["LANGCHAIN_TRACING_V2"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

MODEL = "tiny-chat"
TEXT_SECONDS = 30  # For one request of an agent.
TALK_SECONDS = 60  # For all of them.

WEATHER = {"Paris": "sunny, 18 degrees", "Oslo": "rain, 11 degrees"}


class Tools:
    """The two tools of one conversation, which record their calls. Frameworks read their schemas off the functions."""

    def __init__(self):
        self.calls = []

    def get_weather(self, city: str) -> str:
        """Get the current weather in a city."""
        self.calls.append(("get_weather", city))
        return WEATHER.get(city, "unknown")

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        self.calls.append(("multiply", a, b))
        return a * b


@dataclass(frozen=True)
class Talk:
    """A question, the expected calls in order, and what the answer must contain."""

    question: str
    calls: tuple
    answer: tuple

    def check(self, calls, text):
        assert [tuple(call) for call in calls] == list(self.calls), text
        for words in self.answer:
            assert words in text


TWO_TOOLS = Talk(
    "What is the weather in Paris? And what is 6 times 7?",
    (("get_weather", "Paris"), ("multiply", 6, 7)),
    (WEATHER["Paris"], "42"),
)
ONE_TOOL = Talk("What is the weather in Oslo?", (("get_weather", "Oslo"),), (WEATHER["Oslo"],))
NO_TOOL = Talk("What is the capital of France?", (), ("Paris",))

CHAT = "chat"
RESPONSES = "responses"

every_talk = pytest.mark.parametrize(
    ("talk", "api", "streamed"),
    [
        pytest.param(TWO_TOOLS, CHAT, False, id="two_tools"),
        pytest.param(TWO_TOOLS, CHAT, True, id="two_tools_streamed"),
        pytest.param(TWO_TOOLS, RESPONSES, False, id="two_tools_responses"),
        pytest.param(ONE_TOOL, CHAT, False, id="one_tool"),
        pytest.param(NO_TOOL, CHAT, False, id="no_tool"),
    ],
)


@pytest.fixture(scope="module")
def base_url():
    """The URL of the built-in model, on a server without flags except its port."""
    with GensetServer(out=None) as server:
        yield f"{server.url}/v1"
        assert server.stop() == 0, server.output


async def soon(answer):
    """Awaits an agent's answer, with a timeout."""
    async with asyncio.timeout(TALK_SECONDS):
        return await answer
