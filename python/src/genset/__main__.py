"""`python -m genset`: the `genset` binary."""

from __future__ import annotations

import os
import sys

from genset.backend import find_binary

if __name__ == "__main__":
    binary = find_binary()
    os.execv(binary, [binary, *sys.argv[1:]])
