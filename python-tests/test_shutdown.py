"""Stopping: SIGTERM is a clean end."""

from openai import OpenAI

from genset_server import GensetServer


def test_sigterm_exits_with_0_after_serving():
    with GensetServer() as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
            assert client.models.list().data
        assert server.stop() == 0, server.output


def test_sigterm_before_any_request_exits_with_0():
    with GensetServer() as server:
        assert server.stop() == 0, server.output
