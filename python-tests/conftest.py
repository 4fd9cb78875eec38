"""One server for all tests, and the official client pointed at it."""

import os

import pytest
from openai import OpenAI

from genset_server import GensetServer

# The server is on this machine, so bypass any proxy.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"


@pytest.fixture(scope="session")
def server():
    with GensetServer() as server:
        yield server
        assert server.stop() == 0, server.output


@pytest.fixture(scope="session")
def url():
    """The address of a server whose model calls tools."""
    with GensetServer("--tool-parser", "hermes") as server:
        yield server.url
        assert server.stop() == 0, server.output


@pytest.fixture(scope="session")
def client(server):
    # No retries: a test must see the first answer. A deadline: a hanging server must fail, not hang.
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def ask(client):
    """Sends one user message to tiny-chat; keyword arguments go into the request."""

    def ask(content, **parameters):
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model="tiny-chat", messages=messages, **parameters)

    return ask
