"""pydantic-ai's agent."""

import pytest
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from agent_case import CHAT, MODEL, RESPONSES, TEXT_SECONDS, Tools, base_url, every_talk, soon  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODELS = {CHAT: OpenAIChatModel, RESPONSES: OpenAIResponsesModel}


async def whole(agent, question):
    return (await agent.run(question)).output


async def streamed_text(agent, question):
    async with agent.run_stream(question) as run:
        return "".join([piece async for piece in run.stream_text(delta=True)])


@every_talk
async def test_agent(base_url, talk, api, streamed):  # noqa: F811
    tools = Tools()
    async with AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=TEXT_SECONDS) as client:
        model = MODELS[api](MODEL, provider=OpenAIProvider(openai_client=client))
        functions = [tools.get_weather, tools.multiply]
        agent = Agent(model, tools=functions, model_settings={"temperature": 0})
        run = streamed_text if streamed else whole
        text = await soon(run(agent, talk.question))
    talk.check(tools.calls, text)
