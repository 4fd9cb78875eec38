"""Text completions: no template, so the echo is the prompt."""

PROMPT = "Once upon a time"


def test_plain_completion(client):
    answer = client.completions.create(model="tiny-chat", prompt=PROMPT)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == PROMPT
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_completion_is_the_plain_one(client):
    chunks = client.completions.create(model="tiny-chat", prompt=PROMPT, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == PROMPT


def test_completion_stops_at_a_stop_string(client):
    answer = client.completions.create(model="tiny-chat", prompt=PROMPT, stop=" time")
    assert answer.choices[0].text == "Once upon a"
    assert answer.choices[0].finish_reason == "stop"
