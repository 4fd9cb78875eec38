"""A `genset` process, HTTP requests to it, and the processes that it started."""

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time

# The time limit of one answer, on a busy machine.
ANSWER_SECONDS = 300
# The pause between two polls.
LOOK_AGAIN = 0.02


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status, body):
        super().__init__(f"status {status}: {body}")
        self.status = status
        self.error = body.get("error", {}) if isinstance(body, dict) else {}

    @property
    def kind(self):
        return self.error.get("code")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(seconds, what, look):
    """The first true result of `look`, and how long it took."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        found = look()
        if found:
            return found, time.monotonic() - begun
        time.sleep(LOOK_AGAIN)
    raise AssertionError(f"{what} did not come within {seconds} s")


def ask(port, path, body=None, key=None):
    """The JSON of an answer, or its text if it is not JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = text
    if answer.status >= 300:
        raise Refused(answer.status, parsed)
    return parsed


class Stream:
    """A streamed answer: its events in order."""

    def __init__(self, port, path, body):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self.connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
        self.answer = self.connection.getresponse()
        if self.answer.status >= 300:
            raise Refused(self.answer.status, json.loads(self.answer.read()))

    def __iter__(self):
        for line in self.answer:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield data.decode() if data == b"[DONE]" else json.loads(data)

    def hang_up(self):
        self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def parents():
    """The parent of each process."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                found[int(pid)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            pass
    return found


def is_running(pid):
    """Whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_proc(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return [word.decode(errors="replace") for word in file.read().split(b"\0")]
    except OSError:
        return []


class Genset:
    """A running `genset run`. Leaving the `with` kills it and its descendants."""

    def __init__(self, binary, words, env, log):
        self.port = free_port()
        self.words = [binary, "run", *words]
        self.words += ["--http-port" if "in=http" in words else "--status-port", str(self.port)]
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                self.words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **env}
            )
        self.seen = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.children()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in filter(is_running, self.seen):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def said(self):
        with open(self.log, errors="replace") as file:
            return file.read()

    def is_ready(self):
        assert self.process.poll() is None, f"genset ended with {self.process.returncode}:\n{self.said()[-3000:]}"
        try:
            ask(self.port, "/ready")
            return True
        except (OSError, http.client.HTTPException, Refused):
            return False

    def until_ready(self, seconds):
        """Waits until it is ready; returns how long that took."""
        return wait_until(seconds, f"a ready genset ({' '.join(self.words)}; log {self.log})", self.is_ready)[1]

    def children(self):
        """All descendants of the process."""
        above = parents()
        found = {self.process.pid}
        while more := {pid for pid, parent in above.items() if parent in found} - found:
            found |= more
        found.discard(self.process.pid)
        self.seen |= found
        return found

    def server(self):
        """The server's process, its port and its key."""
        for pid in sorted(self.children()):
            words = read_proc(pid, "cmdline")
            if "--port" not in words:
                continue
            port = int(words[words.index("--port") + 1])
            return pid, port, key_of(words, read_proc(pid, "environ"))
        raise AssertionError("genset has no server")

    def ask(self, path, body=None):
        return ask(self.port, path, body)

    def stream(self, path, body):
        return Stream(self.port, path, body)

    def ended(self, seconds):
        """Waits for the exit; returns the exit code and how long it took."""
        code, took = wait_until(seconds, "the end of genset", lambda: (self.process.poll() is not None) and [self.process.poll()])
        return code[0], took

    def nothing_left(self, seconds):
        """Waits until all its processes are gone; returns how long that took."""
        gone = lambda: not any(map(is_running, self.seen))
        return wait_until(seconds, "the end of the server's processes", gone)[1]


def key_of(words, environment):
    """The key that the launcher passed to a server: in its environment, or in a file named by an argument."""
    for variable in environment:
        name, _, value = variable.partition("=")
        if name in ("VLLM_API_KEY", "LLAMA_API_KEY"):
            return value
    if "--config" in words:
        with open(words[words.index("--config") + 1]) as file:
            return file.read().split('"')[1]
    return None


class Beside(threading.Thread):
    """Runs something in a thread; `result` is its result."""

    def __init__(self, what):
        super().__init__(daemon=True)
        self.what, self.value, self.error = what, None, None
        self.start()

    def run(self):
        try:
            self.value = self.what()
        except BaseException as error:
            self.error = error

    def result(self):
        self.join(ANSWER_SECONDS)
        if self.error:
            raise self.error
        return self.value
