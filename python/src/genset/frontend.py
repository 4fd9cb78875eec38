"""`python -m genset.frontend`: an HTTP server for the models of all workers. Arguments and environment are those of `genset run`. Without
a port in them and without a settings file, the port is 8000."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from genset.backend import find_binary

PORT_VARIABLE = "GENSET_HTTP_PORT"
DEFAULT_PORT = "8000"


def command(arguments: Sequence[str], workers: str = "dyn") -> list[str]:
    """The command that replaces this process. `workers` is the word after `out=`."""
    return [find_binary(), "run", "in=http", f"out={workers}", *arguments]


def environment(arguments: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The environment of that command. Flags override the default in it."""
    has_file = "GENSET_CONFIG" in given or any(argument.split("=")[0] == "--config" for argument in arguments)
    # The environment overrides a file, which may name another port.
    default = {} if has_file else {PORT_VARIABLE: DEFAULT_PORT}
    return {**default, **given}


def become(arguments: Sequence[str], workers: str = "dyn") -> None:
    """Replaces this process with the frontend."""
    words = command(arguments, workers)
    os.execve(words[0], words, environment(arguments, os.environ))


def main() -> None:
    """Replaces this process with the frontend."""
    become(sys.argv[1:])


if __name__ == "__main__":
    main()
