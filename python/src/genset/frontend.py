"""`python -m genset.frontend`: an HTTP server for the models of all workers, on port 8000. Arguments are those of `genset run`."""

from __future__ import annotations

import os
import sys

from genset.backend import find_binary

DEFAULT_PORT = "8000"


def command(arguments: list[str]) -> list[str]:
    """The command that it becomes."""
    has_port = any(argument.split("=")[0] == "--http-port" for argument in arguments)
    port = [] if has_port else ["--http-port", DEFAULT_PORT]
    return [find_binary(), "run", "in=http", "out=dyn", *port, *arguments]


if __name__ == "__main__":
    words = command(sys.argv[1:])
    os.execv(words[0], words)
