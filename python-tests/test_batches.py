"""The official client uploads files, lists and cancels batches, and receives every answer, also after a restart."""

import json
import time

import openai
import pytest
from openai import OpenAI

from genset_server import GensetServer

ENDS = ("completed", "failed", "expired", "cancelled")
WAIT_SECONDS = 60


def client_of(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "batches"


@pytest.fixture
def client(folder):
    with GensetServer("--batch-folder", str(folder), "--token-echo-delay-ms", "0") as server, client_of(server) as client:
        yield client
        assert server.stop() == 0, server.output


def lines(count, model="tiny-chat"):
    def line(index):
        body = {"model": model, "messages": [{"role": "user", "content": f"Hello {index}"}]}
        request = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        return json.dumps(request) + "\n"

    return "".join(map(line, range(count))).encode()


def begin(client, content, **more):
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    endpoint = "/v1/chat/completions"
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def wait_for(client, batch, is_so):
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so(batch := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def end_of(client, batch):
    return wait_for(client, batch, lambda batch: batch.status in ENDS)


def content(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_is_answered(client):
    batch = begin(client, lines(30), metadata={"run": "1"})
    assert (batch.object, batch.completion_window, batch.metadata) == ("batch", "24h", {"run": "1"})
    batch = end_of(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 30, 30, 0)
    assert batch.error_file_id is None
    answers = content(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"r{index}" for index in range(30)]
    for index, answer in enumerate(answers):
        assert answer["response"]["status_code"] == 200
        assert f"Hello {index}" in answer["response"]["body"]["choices"][0]["message"]["content"]
    assert [listed.id for listed in client.batches.list()] == [batch.id]


def test_what_fails_is_in_the_other_file(client):
    batch = end_of(client, begin(client, lines(2) + lines(1, model="nobody").replace(b"r0", b"bad")))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    [error] = content(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 404)


def test_an_input_that_is_none_fails_with_its_line(client):
    batch = end_of(client, begin(client, lines(1) + b"not JSON\n"))
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors.data] == [("invalid_json_line", 2)]


def test_files_are_listed_read_and_deleted(client):
    files = [client.files.create(file=("a.jsonl", lines(1)), purpose="batch") for _ in range(3)]
    file = files[-1]
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "a.jsonl", len(lines(1)), "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == lines(1)
    # There are two pages.
    assert {listed.id for listed in client.files.list(limit=2)} == {file.id for file in files}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_what_is_not_there_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a.jsonl", b"{}"), purpose="assistants")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.NotFoundError) as caught:
        client.batches.create(input_file_id="file-0", endpoint="/v1/completions", completion_window="24h")
    assert caught.value.param == "input_file_id"


def test_a_batch_goes_on_after_its_server_was_killed(folder):
    options = ["--batch-folder", str(folder), "--batch-concurrency", "1"]
    with GensetServer(*options, "--token-echo-delay-ms", "2") as server, client_of(server) as client:
        batch = begin(client, lines(40))
        wait_for(client, batch, lambda batch: batch.request_counts.completed >= 3)
        server.kill()
    with GensetServer(*options, "--token-echo-delay-ms", "0") as server, client_of(server) as client:
        batch = end_of(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        answers = content(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"r{index}" for index in range(40)]
        assert server.stop() == 0, server.output


def test_a_batch_is_cancelled(folder):
    options = ["--batch-folder", str(folder), "--batch-concurrency", "1", "--token-echo-delay-ms", "5"]
    with GensetServer(*options) as server, client_of(server) as client:
        batch = begin(client, lines(1000))
        wait_for(client, batch, lambda batch: batch.request_counts.completed >= 1)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = end_of(client, batch)
        assert batch.status == "cancelled"
        assert 1 <= len(content(client, batch.output_file_id)) < 1000
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        assert server.stop() == 0, server.output
