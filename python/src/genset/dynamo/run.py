"""The wheel's program `dynamo-run`, and `python -m genset.dynamo.run`: the `genset` binary under that name, by which its arguments are
those of `genset run`."""

from __future__ import annotations

import os
import sys

from genset.backend import find_binary


def main() -> None:
    """Replaces this process with the binary."""
    os.execv(find_binary(), ["dynamo-run", *sys.argv[1:]])


if __name__ == "__main__":
    main()
