"""The official Anthropic client: messages whole and streamed, counted tokens, models, errors."""

from datetime import datetime

import anthropic
import pytest
from anthropic import Anthropic

HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def claude(server):
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=30) as claude:
        yield claude


def test_a_message_has_content_usage_and_an_id(claude):
    message = claude.messages.create(model="tiny-chat", max_tokens=64, messages=HELLO)
    assert message.type == "message" and message.role == "assistant"
    assert [block.type for block in message.content] == ["text"]
    assert "Hello there" in message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens > 0
    assert message._request_id


def test_the_stream_adds_up_to_the_message(claude):
    whole = claude.messages.create(model="tiny-chat", max_tokens=3, messages=HELLO)
    with claude.messages.stream(model="tiny-chat", max_tokens=3, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.content[0].text == text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 3
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_a_system_prompt_is_part_of_the_prompt(claude):
    # The echo engine answers with its prompt, up to the end of the first message.
    message = claude.messages.create(model="tiny-chat", max_tokens=64, messages=HELLO, system="Be brief.")
    assert "Be brief." in message.content[0].text


def test_counted_tokens_are_those_of_the_message(claude):
    counted = claude.messages.count_tokens(model="tiny-chat", messages=HELLO)
    message = claude.messages.create(model="tiny-chat", max_tokens=1, messages=HELLO)
    assert counted.input_tokens == message.usage.input_tokens


def test_models_are_listed_and_retrieved(claude):
    page = claude.models.list(limit=1)
    assert [model.id for model in page] == ["tiny-chat"]
    model = claude.models.retrieve("tiny-chat")
    assert model.to_dict() == page.data[0].to_dict()
    assert model.type == "model" and model.display_name == "tiny-chat"
    assert isinstance(model.created_at, datetime)
    assert claude.models.list(after_id="tiny-chat").data == []
    assert claude.models.list(lifecycle=["retired"]).data == []
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("org/claude")


def test_an_unknown_model_is_not_found(claude):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="claude", max_tokens=1, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_block_that_is_not_taken_is_named(claude, stream):
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    messages = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny-chat", max_tokens=1, messages=messages, stream=stream)
    assert "messages[0].content[0].source.type" in caught.value.body["error"]["message"]


def test_a_document_of_text_is_part_of_the_prompt(claude):
    source = {"type": "text", "media_type": "text/plain", "data": "a page"}
    messages = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    message = claude.messages.create(model="tiny-chat", max_tokens=64, messages=messages)
    assert "a page" in message.content[0].text


def test_an_image_that_is_none_is_named(claude):
    source = {"type": "base64", "media_type": "image/png", "data": ""}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny-chat", max_tokens=1, messages=messages)
    assert "messages[0].content[0].source" in caught.value.body["error"]["message"]


def test_closing_the_stream_frees_the_server(claude, server):
    messages = [{"role": "user", "content": "one two three four " * 100}]
    with claude.messages.stream(model="tiny-chat", max_tokens=1000, messages=messages) as stream:
        next(iter(stream.text_stream))
    server.wait_until_idle()
