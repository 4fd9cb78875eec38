"""Keys: cache hits of one tenant reveal nothing about another's prompts."""

import os
import subprocess

from openai import OpenAI

from genset_server import GensetServer

PROMPT = "The quick brown fox jumps over the lazy dog, again and again and again. " * 3


def made_key(name, path):
    """Creates a key, and adds its lines to the file."""
    made = subprocess.run([os.environ["GENSET_BIN"], "key", name], capture_output=True, text=True, check=True)
    words = (made.stdout + made.stderr).split()
    lines = made.stdout[made.stdout.index("[[key]]") :]
    with open(path, "a", encoding="utf-8") as file:
        file.write(lines)
    return next(word for word in words if word.startswith("sk-genset-"))


def test_a_key_reuses_its_own_prompts_and_no_other_keys(tmp_path):
    file = tmp_path / "keys.toml"
    alice, bob = made_key("alice", file), made_key("bob", file)
    with GensetServer("--api-keys", str(file), out="candle") as server:

        def cached(key, **extra):
            with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
                answer = client.completions.create(model="tiny-chat", prompt=PROMPT, max_tokens=2, extra_body=extra)
                return answer.usage.prompt_tokens_details.cached_tokens

        assert cached(alice) == 0
        assert cached(bob) == 0, "another key's prompt"
        assert cached(alice) > 0, "its own"
        assert cached(bob) > 0, "its own"
        assert cached(alice, cache_salt="x") == 0, "narrowed"
        assert cached(alice, cache_salt="x") > 0
