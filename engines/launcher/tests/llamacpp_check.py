"""A real llama.cpp behind the real binary: a chat, a stream, a completion, and the shutdown.

Run by `cargo xtask llamacpp-check` with an interpreter that has llama_cpp.server: llamacpp_check.py GENSET MODEL.gguf
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

# Loading is fast, but the machine may be busy.
START_SECONDS = 300
ANSWER_SECONDS = 300

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with OPENER.open(request, timeout=ANSWER_SECONDS) as answer:
        return answer.read().decode()


def wait_until_ready(port, server):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"genset ended with {server.returncode} before it was ready")
        try:
            with OPENER.open(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                models = json.load(answer)["data"]
                if models:
                    return models[0]["id"]
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.2)
    sys.exit(f"genset was not ready within {START_SECONDS} s")


def processes_of(text):
    """Processes whose command line contains the text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(int(pid))
    return found


def main():
    genset, model = sys.argv[1:]
    port = free_port()
    command = f"{shlex.quote(sys.executable)} -m llama_cpp.server"
    words = [genset, "run", "in=http", "out=llamacpp", model, "--http-port", str(port), "--server-cmd", command]
    print("$", shlex.join(words), flush=True)
    server = subprocess.Popen(words)
    try:
        name = wait_until_ready(port, server)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        chat = {"model": name, "messages": question, "max_tokens": 16, "temperature": 0}

        answer = json.loads(post(port, "/v1/chat/completions", chat))
        print(json.dumps(answer), flush=True)
        text = answer["choices"][0]["message"]["content"]
        assert text.strip(), answer
        assert answer["usage"]["completion_tokens"] > 0 and answer["usage"]["prompt_tokens"] > 0, answer

        events = post(port, "/v1/chat/completions", {**chat, "stream": True}).split("\n\n")
        pieces = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        deltas = [piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"]]
        print("streamed", deltas, flush=True)
        assert "".join(deltas) == text, (deltas, text)
        assert len([delta for delta in deltas if delta]) > 1, deltas

        completion = {"model": name, "prompt": "The capital of France", "max_tokens": 4, "temperature": 0}
        answer = json.loads(post(port, "/v1/completions", completion))
        print(json.dumps(answer), flush=True)
        assert answer["choices"][0]["text"], answer
        assert processes_of(f"--model {model}"), "llama_cpp.server runs"

        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=ANSWER_SECONDS) == 0, server.returncode
        assert not processes_of(f"--model {model}"), "llama_cpp.server is gone"
        print("llama.cpp answers through genset, and goes with it", flush=True)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
