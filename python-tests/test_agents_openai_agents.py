"""The agent of OpenAI's Agents SDK."""

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from agent_case import (  # noqa: F401
    CHAT,
    MODEL,
    ONE_TOOL,
    RESPONSES,
    TEXT_SECONDS,
    Tools,
    base_url,
    every_talk,
    soon,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
# The second is the default of an agent that gets only a model name.
MODELS = {CHAT: OpenAIChatCompletionsModel, RESPONSES: OpenAIResponsesModel}
set_tracing_disabled(True)


async def whole(agent, question):
    return (await Runner.run(agent, question)).final_output


async def streamed_text(agent, question):
    run = Runner.run_streamed(agent, question)
    pieces = []
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    text = "".join(pieces)
    assert text.endswith(run.final_output)
    return text


@every_talk
async def test_agent(base_url, talk, api, streamed):  # noqa: F811
    tools = Tools()
    async with AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=TEXT_SECONDS) as client:
        agent = Agent(
            name="Assistant",
            model=MODELS[api](model=MODEL, openai_client=client),
            model_settings=ModelSettings(temperature=0),
            tools=[function_tool(tools.get_weather), function_tool(tools.multiply)],
        )
        run = streamed_text if streamed else whole
        text = await soon(run(agent, talk.question))
    talk.check(tools.calls, text)


class Weather(BaseModel):
    degrees: int


@pytest.mark.parametrize("api", [CHAT, RESPONSES])
async def test_agent_with_an_output_type(base_url, api):  # noqa: F811
    """Its requests have tools and a format: the call uses the model's own markup, and the answer follows the format."""
    tools = Tools()
    async with AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=TEXT_SECONDS) as client:
        agent = Agent(
            name="Assistant",
            model=MODELS[api](model=MODEL, openai_client=client),
            model_settings=ModelSettings(temperature=0, max_tokens=100),
            tools=[function_tool(tools.get_weather), function_tool(tools.multiply)],
            output_type=Weather,
        )
        output = (await soon(Runner.run(agent, ONE_TOOL.question))).final_output
    assert tools.calls == list(ONE_TOOL.calls)
    assert isinstance(output, Weather)
