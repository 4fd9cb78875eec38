"""A running `genset run in=http` (GENSET_BIN), for the scripts that use it with a browser."""

import os
import re
import subprocess
import sys
import urllib.request

GENSET = os.environ["GENSET_BIN"]
PATIENCE_S = 60


class Server:
    """It starts at once, and is killed at the end of the `with` block unless it was stopped before."""

    def __init__(self, *words: str) -> None:
        command = [GENSET, "run", "in=http", "--http-port", "0", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.process.stdout:
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                return
        self.process.kill()
        sys.exit("the server said no address")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @staticmethod
    def new_key() -> tuple[str, str]:
        """Returns an API key, and its lines for the file of keys."""
        shown = subprocess.run([GENSET, "key", "browser"], capture_output=True, text=True, check=True).stdout
        _, key, _, lines = shown.split("\n\n", 3)
        return key, lines

    def given(self) -> int:
        """The number of tokens generated so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            metrics = answer.read().decode()
        return int(re.search(r"^genset_http_completion_tokens_total (\d+)", metrics, re.MULTILINE)[1])

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, "it ends cleanly"
