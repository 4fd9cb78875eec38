"""The programs in the readme and in the guides for clients run unchanged against a server.

`python/tests` and `python/runtime_tests` do the same for the guides about Python.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_case import TWO_TOOLS, base_url  # noqa: F401
from genset_server import GensetServer, embedding_server

REPOSITORY = Path(__file__).parent.parent
GUIDES = REPOSITORY / "docs" / "guide"
ABOUT_PYTHON = {"coming-from-dynamo.md", "python-engines.md", "python-services.md", "python-workers.md"}
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN_ADDRESS = "http://127.0.0.1:8080"
PROGRAM_SECONDS = 120

README = REPOSITORY / "README.md"
DEVELOPERS = GUIDES / "application-developers.md"
EMBEDDINGS = GUIDES / "embeddings.md"
OTHER_APIS = GUIDES / "other-apis.md"

# The questions to the built-in model, and what the answers must contain.
QUESTIONS = [
    (README, "ask.py", ("Paris",)),
    (DEVELOPERS, "chat.py", ("Paris", " tokens\n", "length\n")),
    (DEVELOPERS, "agent_langchain.py", TWO_TOOLS.answer),
    (DEVELOPERS, "agent_pydantic.py", TWO_TOOLS.answer),
    (DEVELOPERS, "agent_openai.py", TWO_TOOLS.answer),
    (DEVELOPERS, "agent.mjs", TWO_TOOLS.answer),
]
OTHERS = [
    (DEVELOPERS, "my_tools.py"),
    (EMBEDDINGS, "embed.py"),
    (OTHER_APIS, "batch.py"),
    (OTHER_APIS, "message.py"),
]


def programs(page):
    """The text of each program on a page, by name. The pieces of a program are joined."""
    pieces = {}
    for language, name, text in BLOCK.findall(page.read_text()):
        assert name or language not in ("python", "js"), f"{page.name} shows code that nothing runs: {text}"
        if name:
            pieces.setdefault(name, []).append(text)
    return {name: "\n".join(texts) for name, texts in pieces.items()}


def printed(page, name, folder, url):
    """Runs a program in `folder` against the server at `url`, and returns its output."""
    for file, text in programs(page).items():
        (folder / file).write_text(text.replace(SHOWN_ADDRESS, url))
    interpreter = "node" if name.endswith(".mjs") else sys.executable
    ran = subprocess.run(
        [interpreter, name], cwd=folder, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_program_is_run():
    pages = [README, *(page for page in GUIDES.glob("*.md") if page.name not in ABOUT_PYTHON)]
    shown = {(page, name) for page in pages for name in programs(page)}
    assert shown == {(page, name) for page, name, _ in QUESTIONS} | set(OTHERS)


@pytest.mark.parametrize(("page", "name", "answer"), QUESTIONS, ids=[name for _, name, _ in QUESTIONS])
def test_the_built_in_model_answers(base_url, tmp_path, page, name, answer):  # noqa: F811
    if name.endswith(".mjs"):
        packages = os.environ.get("AI_SDK_DIR")
        assert packages, "AI_SDK_DIR names no folder with the AI SDK; run: cargo xtask test openai-client"
        (tmp_path / "node_modules").symlink_to(Path(packages).resolve() / "node_modules")
    text = printed(page, name, tmp_path, base_url.removesuffix("/v1"))
    for words in answer:
        assert words in text


def test_inputs_are_embedded(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with embedding_server("bge-small-en-v1.5", folder) as server:
        dimensions, tokens = printed(EMBEDDINGS, "embed.py", tmp_path, server.url).split()
        assert (int(dimensions), int(tokens) > 0) == (8, True)
        assert server.stop() == 0, server.output


def test_a_batch_and_a_message_are_answered(tmp_path):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}]}
    line = {"custom_id": "first", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line) + "\n")
    with GensetServer("--batch-folder", str(tmp_path / "batches")) as server:
        answer = json.loads(printed(OTHER_APIS, "batch.py", tmp_path, server.url))
        assert (answer["custom_id"], answer["response"]["status_code"]) == ("first", 200)
        assert "Hello" in printed(OTHER_APIS, "message.py", tmp_path, server.url)
        assert server.stop() == 0, server.output
