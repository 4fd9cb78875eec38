"""The official client's own test suite, from the source distribution of the installed version.

`openai_suite.toml` lists every test of FILES: those that must pass, those that must pass once `suite_values` has filled in
missing values, and those left out, each with its reason.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
RESOURCES = "tests/api_resources"
# The test files by model: the suite uses a different model for each group.
FILES = {
    "gpt-6-astra": ["chat", "responses", "test_responses.py", "test_models.py"],
    "gpt-3.5-turbo-instruct": ["test_completions.py"],
    "text-embedding-3-small": ["test_embeddings.py"],
}
DOWNLOAD_SECONDS = 120
RUN_SECONDS = 300


def fetch(folder):
    """Downloads and unpacks the source distribution; returns its folder."""
    version = importlib.metadata.version("openai")
    suite = folder / f"openai-{version}"
    if not suite.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai"]
        command += ["--dest", str(folder), f"openai=={version}"]
        subprocess.run(command, check=True, timeout=DOWNLOAD_SECONDS)
        with tarfile.open(folder / f"openai-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return suite


def run(suite, files, url, folder):
    """Runs the tests of `files` against the server at `url`. Returns by id: outcome, explanation, and whether values were filled in."""
    written, filled = folder / "outcomes.json", folder / "filled.json"
    command = [sys.executable, "-B", "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=line"]
    command += ["-p", "suite_outcomes", "--outcomes", str(written), "-p", "suite_values", "--filled", str(filled)]
    command += [f"{RESOURCES}/{name}" for name in files]
    environment = {**os.environ, "TEST_API_BASE_URL": f"{url}/v1", "PYTHONPATH": str(HERE)}
    ran = subprocess.run(command, cwd=suite, env=environment, timeout=RUN_SECONDS, capture_output=True, text=True)
    assert ran.returncode in (0, 1), f"{ran.stdout}\n{ran.stderr}"
    changed = json.loads(filled.read_text())
    return {test: (*outcome, test in changed) for test, outcome in json.loads(written.read_text()).items()}


def listed():
    """The tests that must pass unchanged, those that must pass with filled-in values, and those left out, with reasons."""
    suite = tomllib.loads((HERE / "openai_suite.toml").read_text())
    left_out = {}
    for group in suite["left_out"]:
        assert group["reason"], "a test is left out for a reason"
        for test in group["tests"]:
            assert left_out.setdefault(test, group["reason"]) == group["reason"], f"{test} is listed twice"
    as_it_is, with_values = suite["run"], suite["run_with_values"]
    every = [*as_it_is, *with_values, *left_out]
    assert len(set(every)) == len(every), "a test is listed twice"
    return set(as_it_is), set(with_values), left_out


def names(test):
    """The names that the list may use for a test: with its variant (`[strict]`), or without, for all variants."""
    short = test.removeprefix(f"{RESOURCES}/")
    return short, re.sub(r"\[[^]]*\]$", "", short)
