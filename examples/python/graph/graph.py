"""Three services: one serves OpenAI's chat, one generates words with types of its own, and one prepares its prompts.

    genset serve graph:Frontend
    genset run in=http out=dyn        in another terminal, for HTTP
"""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel

from genset.llm import ModelType, register_llm
from genset.runtime import Context
from genset.sdk import config, depends, endpoint, endpoint_of, on_start, service

NAMESPACE = "graph"


class Prompt(BaseModel):
    text: str
    max_words: int = 16


class Prepared(BaseModel):
    words: list[str]


class Word(BaseModel):
    text: str
    is_last: bool


@service(namespace=NAMESPACE)
class Prefill:
    """Splits a prompt into words."""

    @endpoint()
    async def prefill(self, request: Prompt) -> Prepared:
        return Prepared(words=request.text.split())


@service(namespace=NAMESPACE, workers=2)
class Backend:
    """Repeats a prompt backwards, one word at a time."""

    prefill = depends(Prefill)

    @endpoint()
    async def generate(self, request: Prompt, context: Context) -> AsyncIterator[Word]:
        prepared = await self.prefill.prefill(request, context=context)
        words = prepared.words[::-1][: request.max_words]
        for place, word in enumerate(words, start=1):
            yield Word(text=word, is_last=place == len(words))


@service(namespace=NAMESPACE)
class Frontend:
    """Reads chats as clients send them, calls the backend with its own types, and answers with chunks of a chat."""

    backend = depends(Backend)

    @on_start
    async def register(self) -> None:
        name = config().get("model", "backwards")
        await register_llm(ModelType.Chat, endpoint_of(self, "chat"), name)

    @endpoint()
    async def chat(self, body: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        prompt = Prompt(text=body["messages"][-1]["content"], max_words=body.get("max_tokens") or 16)
        count = 0
        async for word in self.backend.generate(prompt, context=context):
            count += 1
            delta = {"role": "assistant", "content": word.text + ("" if word.is_last else " ")}
            reason = "stop" if word.is_last else None
            yield {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        prompt_tokens = len(prompt.text.split())
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
        yield {"object": "chat.completion.chunk", "choices": [], "usage": usage}
