"""The program `dynamo-run` of the wheel, and `python -m genset.dynamo.run`: the `genset` binary under that name, by which it takes the words
of `genset run` alone."""

from __future__ import annotations

import os
import sys

from genset.backend import find_binary


def main() -> None:
    """Becomes the binary."""
    os.execv(find_binary(), ["dynamo-run", *sys.argv[1:]])


if __name__ == "__main__":
    main()
