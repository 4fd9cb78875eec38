"""The levels of a program's log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genset import _logging


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("debug", {"": logging.DEBUG}),
        ("WARN,a::b=trace, c.d=off", {"": logging.WARNING, "a.b": 1, "c.d": logging.CRITICAL + 1}),
        # Directives about spans, and invalid levels.
        ("genset[request{id=7}]=debug,hyper,=info,error", {"": logging.ERROR}),
        ("", {}),
    ],
)
def test_a_filter_names_levels_of_loggers(text: str, levels: dict[str, int]) -> None:
    assert _logging.levels_of(text) == levels


def shown(*before: str, **given: str) -> list[str]:
    """What a program logs with two loggers, at two levels."""
    lines = [
        "import logging",
        "from genset import _logging",
        *before,
        "_logging.configure_program()",
        "for name in ('mine', 'other'):",
        "    for level in ('debug', 'info', 'error'):",
        "        getattr(logging.getLogger(name), level)('said')",
    ]
    unset = {key: value for key, value in os.environ.items() if key not in _logging.FILTER_VARIABLES}
    source = Path(_logging.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=source, env={**unset, **given}, capture_output=True, text=True, check=True
    )
    return [" ".join(line.split()[-3:-1]) for line in ran.stderr.splitlines()]


def test_a_program_s_log_has_the_level_of_the_environment() -> None:
    assert shown() == ["INFO mine:", "ERROR mine:", "INFO other:", "ERROR other:"]
    assert shown(GENSET_LOG="error", DYN_LOG="debug") == ["ERROR mine:", "ERROR other:"]
    assert shown(GENSET_LOG="", DYN_LOG="error") == ["ERROR mine:", "ERROR other:"]
    assert shown(DYN_LOG="off,mine=debug") == ["DEBUG mine:", "INFO mine:", "ERROR mine:"]
    # A log that the program has set up stays unchanged.
    own = "logging.basicConfig(level='ERROR', format='own %(levelname)s %(name)s: %(message)s')"
    assert shown(own, GENSET_LOG="debug,mine=debug") == ["ERROR mine:", "ERROR other:"]


def test_a_record_of_a_worker_s_child_has_its_level_on_each_line_that_says_something() -> None:
    record = logging.LogRecord("mine", logging.ERROR, __file__, 1, "one\n\ntwo", None, None)
    assert _logging._OneLevelALine("%(name)s: %(message)s").format(record) == "ERROR mine: one\nERROR two"
