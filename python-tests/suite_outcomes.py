"""A pytest plugin that records which tests passed and failed: `-p suite_outcomes --outcomes FILE`."""

import json
from pathlib import Path

import pytest

outcomes = {}


def pytest_addoption(parser):
    parser.addoption("--outcomes", required=True)


def pytest_runtest_logreport(report):
    if not report.passed:
        outcomes[report.nodeid] = report.outcome, report.longreprtext
    elif report.when == "call":
        outcomes.setdefault(report.nodeid, (report.outcome, ""))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    Path(session.config.getoption("--outcomes")).write_text(json.dumps(outcomes))
