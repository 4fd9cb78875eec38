"""LangChain's agent, on LangGraph, with langchain-openai's model."""

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI

from agent_case import MODEL, RESPONSES, TEXT_SECONDS, Tools, base_url, every_talk, soon  # noqa: F401

# One loop for all tests: LangChain caches its HTTP client, which is bound to the loop of its first request.
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def whole(agent, question):
    state = await agent.ainvoke(question)
    return state["messages"][-1].text


async def streamed_text(agent, question):
    pieces = []
    async for message, _ in agent.astream(question, stream_mode="messages"):
        if isinstance(message, AIMessageChunk):
            pieces.append(message.text)
    return "".join(pieces)


@every_talk
async def test_agent(base_url, talk, api, streamed):  # noqa: F811
    tools = Tools()
    model = ChatOpenAI(
        model=MODEL,
        base_url=base_url,
        api_key="unused",
        temperature=0,
        timeout=TEXT_SECONDS,
        max_retries=0,
        use_responses_api=api == RESPONSES,
    )
    agent = create_agent(model, [tools.get_weather, tools.multiply])
    question = {"messages": [{"role": "user", "content": talk.question}]}
    run = streamed_text if streamed else whole
    talk.check(tools.calls, await soon(run(agent, question)))
