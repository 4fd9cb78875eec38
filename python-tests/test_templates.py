"""The recorded prompts of frontend/tests/templates are what `transformers` produces today; the server produces the same."""

import json
from pathlib import Path

import pytest

import template_goldens as reference
from genset_server import GensetServer, post

MODEL = Path(__file__).parent.parent / "models" / "tiny-chat"
# Its prompt contains today's date, so there is no golden for it.
DATED = "llama3"
CASE = "several turns"


@pytest.mark.parametrize("template", reference.TEMPLATES)
def test_the_goldens_are_what_transformers_makes(template):
    recorded = json.loads(reference.golden_path(template).read_text())
    assert reference.golden(template) == recorded


def test_the_date_is_todays_for_server_and_transformers(tmp_path):
    template = tmp_path / "template.jinja"
    # The test's tokenizer has other special tokens.
    template.write_text(reference.source(DATED).replace("{{- bos_token }}", ""))
    case = reference.CASES[CASE]
    before = reference.apply(DATED, case)
    with GensetServer("--chat-template", str(template), "--model-path", str(MODEL)) as server:
        _, tokenized = post(f"{server.url}/tokenize", {"model": "tiny-chat", "messages": case["messages"]})
        _, text = post(f"{server.url}/detokenize", {"model": "tiny-chat", "tokens": json.loads(tokenized)["tokens"]})
        prompt = json.loads(text)["prompt"]
        assert server.stop() == 0, server.output
    bos = reference.TEMPLATES[DATED]["bos_token"]
    # The date may change at midnight in between.
    assert f"{bos}{prompt}" in (before, reference.apply(DATED, case))
