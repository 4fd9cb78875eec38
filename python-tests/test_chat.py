"""Chat completions. The echo engine answers with the templated prompt, up to its first end-of-sequence token."""

QUESTION = "What is the capital of France?"
ECHO = f"user\n{QUESTION}"
WHOLE_PROMPT = f"{ECHO}\nassistant\n"


def text_of(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_plain_answer(ask):
    answer = ask(QUESTION)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny-chat"
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert choice.message.role == "assistant"
    assert choice.message.content == ECHO
    assert 0 < answer.usage.completion_tokens <= answer.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_text_beyond_ascii_comes_back_whole(ask):
    text = "Ça va ? 👩‍🔬👍🏽🇫🇷 zażółć 你好"
    assert ask(text).choices[0].message.content == f"user\n{text}"
    assert text_of(ask(text, stream=True)) == f"user\n{text}"


def test_system_message_comes_first(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model="tiny-chat", messages=messages)
    assert answer.choices[0].message.content == "system\nBe brief."


def test_streamed_answer_is_the_plain_answer(ask):
    chunks = list(ask(QUESTION, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == ECHO
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_chunk_comes_last_and_has_no_choices(ask):
    chunks = list(ask(QUESTION, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == ask(QUESTION).usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert text_of(chunks) == ECHO


def test_two_choices(ask):
    answer = ask(QUESTION, n=2)
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    assert [choice.message.content for choice in answer.choices] == [ECHO, ECHO]


def test_two_streamed_choices(ask):
    texts = {0: "", 1: ""}
    for chunk in ask(QUESTION, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: ECHO, 1: ECHO}


def test_stop_string_ends_the_answer_and_never_leaks(ask):
    question = "one two three four"
    for stop in ["three", "wo thr", ["nowhere", "three four"]]:
        first = stop if isinstance(stop, str) else stop[-1]
        expected = f"user\n{question}".split(first)[0]
        answer = ask(question, stop=stop)
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"
        assert text_of(ask(question, stop=stop, stream=True)) == expected


def test_token_limit_ends_the_answer(ask):
    answer = ask(QUESTION, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3
    assert ECHO.startswith(answer.choices[0].message.content)


def test_ignore_eos_echoes_past_the_end_of_sequence(ask):
    prompt_tokens = ask(QUESTION).usage.prompt_tokens
    answer = ask(QUESTION, max_completion_tokens=prompt_tokens, extra_body={"nvext": {"ignore_eos": True}})
    assert answer.choices[0].message.content == WHOLE_PROMPT
    assert answer.usage.completion_tokens == prompt_tokens


def test_closing_a_stream_early_frees_the_request(ask, server):
    stream = ask("one two three four five " * 250, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_until_idle()
    assert ask(QUESTION).choices[0].message.content == ECHO
