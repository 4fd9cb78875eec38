"""The exceptions that a client sees."""

import openai
import pytest


def test_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.status_code == 404
    assert caught.value.code == "model_not_found"
    assert "no-such-model" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_negative_temperature_is_a_bad_request_that_names_it(ask, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        ask("Hello", temperature=-3, stream=stream)
    assert caught.value.status_code == 400
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_message_order_is_explained(client):
    messages = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Hello?"}]
    with pytest.raises(openai.BadRequestError, match="alternate"):
        client.chat.completions.create(model="tiny-chat", messages=messages)


def test_prompt_beyond_the_context_is_a_bad_request(ask):
    with pytest.raises(openai.BadRequestError) as caught:
        ask("one two three four " * 1000)
    assert caught.value.code == "context_length_exceeded"


def test_refused_requests_leave_nothing_in_flight(ask, server):
    with pytest.raises(openai.BadRequestError):
        ask("Hello", temperature=-3)
    server.wait_until_idle()
