"""The official client's Responses API: whole and streamed, conversations, errors."""

import openai
import pytest


def test_a_response_has_text_usage_and_an_id(client):
    response = client.responses.create(model="tiny-chat", input="Hello there")
    assert response.id.startswith("resp_")
    assert response.object == "response"
    assert "Hello there" in response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response._request_id


def test_the_stream_adds_up_to_the_response(client):
    whole = client.responses.create(model="tiny-chat", input="Hello there", max_output_tokens=3)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="tiny-chat", input="Hello there", max_output_tokens=3) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text


def test_a_conversation_goes_on(client):
    first = client.responses.create(model="tiny-chat", input="Hello there", instructions="Be brief.")
    second = client.responses.create(model="tiny-chat", input="And now?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.output_tokens
    again = client.responses.retrieve(first.id)
    assert again.output_text == first.output_text
    items = client.responses.input_items.list(second.id, order="asc")
    roles = [item.role for item in items]
    assert roles == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_an_item_of_an_answer_is_given_by_its_id(client):
    first = client.responses.create(model="tiny-chat", input="Hello there", max_output_tokens=8)
    question, further = {"role": "user", "content": "Hello there"}, {"role": "user", "content": "And now?"}

    def input_tokens(answer):
        conversation = [question, answer, further]
        response = client.responses.create(model="tiny-chat", input=conversation, max_output_tokens=1)
        return response.usage.input_tokens

    whole = {"role": "assistant", "content": first.output_text}
    assert input_tokens({"type": "item_reference", "id": first.output[0].id}) == input_tokens(whole)


def test_what_is_not_there_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny-chat", input="Hi", background=True)
    assert caught.value.param == "background"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny-chat", input="Hi", tools=[{"type": "mcp", "server_label": "a"}])
    assert caught.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nope", input="Hi")
