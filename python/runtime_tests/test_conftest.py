"""The programs that tests start."""

from __future__ import annotations

import sys

import pytest
from conftest import starting


def test_what_runs_ends_if_the_next_program_does_not_start() -> None:
    with pytest.raises(FileNotFoundError), starting() as begin:
        left = begin(sys.executable, "-c", "import time; time.sleep(600)")
        begin("/no/such/program")
    assert left.process.poll() is not None
