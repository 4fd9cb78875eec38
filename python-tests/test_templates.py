"""The recorded prompts of frontend/tests/templates are what `transformers` produces today; the server produces the same."""

import json
import urllib.request
from pathlib import Path

import pytest

import template_goldens as reference
from genset_server import GensetServer

MODEL = Path(__file__).parent.parent / "models" / "tiny-chat"
# Its prompt contains today's date, so there is no golden for it.
DATED = "llama3"
CASE = "several turns"


@pytest.mark.parametrize("template", reference.TEMPLATES)
def test_the_goldens_are_what_transformers_makes(template):
    recorded = json.loads(reference.golden_path(template).read_text())
    assert reference.golden(template) == recorded


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_the_date_is_todays_for_server_and_transformers(tmp_path):
    template = tmp_path / "template.jinja"
    # The test's tokenizer has other special tokens.
    template.write_text(reference.source(DATED).replace("{{- bos_token }}", ""))
    case = reference.CASES[CASE]
    before = reference.apply(DATED, case)
    with GensetServer("--chat-template", str(template), "--model-path", str(MODEL)) as server:
        tokens = post(f"{server.url}/tokenize", {"model": "tiny-chat", "messages": case["messages"]})["tokens"]
        prompt = post(f"{server.url}/detokenize", {"model": "tiny-chat", "tokens": tokens})["prompt"]
        assert server.stop() == 0, server.output
    bos = reference.TEMPLATES[DATED]["bos_token"]
    # The date may change at midnight in between.
    assert f"{bos}{prompt}" in (before, reference.apply(DATED, case))
