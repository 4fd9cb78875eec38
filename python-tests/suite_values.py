"""A pytest plugin that fills in values that requests of the client's suite lack: `-p suite_values --filled FILE`.

The suite was made for a mock that answers anything: its tests create responses without a model or input, and retrieve
responses that do not exist. Such a request gets a model and an input, and the placeholder becomes the id of a response made
for it. FILE then lists the tests whose requests were changed. All other requests are sent unchanged.
"""

import json
import os
import re
import urllib.request
from pathlib import Path

import pytest
from openai._base_client import BaseClient

LACKING = {"model": "gpt-6-astra", "input": "Hello"}
CREATES = ("/responses", "/responses/input_tokens")
PLACEHOLDER = re.compile(r"^/responses/(resp_677efb5139a88190b512bc3fef8e535d|response_id)(?=/|$)")

filled = set()
running = None


def pytest_addoption(parser):
    parser.addoption("--filled", required=True)


def pytest_configure(config):
    build = BaseClient._build_request

    def build_filled(self, options, **further):
        return build(self, fill(options), **further)

    BaseClient._build_request = build_filled


def fill(options):
    """Returns the request with its missing values. Idempotent."""
    if options.method.lower() == "post" and options.url in CREATES:
        lacking = {name: value for name, value in LACKING.items() if name not in (options.json_data or {})}
        if lacking:
            filled.add(running)
            options.json_data = {**lacking, **(options.json_data or {})}
    elif PLACEHOLDER.match(options.url):
        filled.add(running)
        options.url = PLACEHOLDER.sub(f"/responses/{new_response()}", options.url)
    return options


def new_response():
    url = f"{os.environ['TEST_API_BASE_URL']}/responses"
    request = urllib.request.Request(url, json.dumps(LACKING).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["id"]


def pytest_runtest_setup(item):
    global running
    running = item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    Path(session.config.getoption("--filled")).write_text(json.dumps(sorted(filled)))
