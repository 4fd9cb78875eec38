"""The official client's own test suite against real servers. Its tests are listed in openai_suite.toml."""

import os
from pathlib import Path

import pytest

import openai_suite
from genset_server import MODEL, GensetServer, embedding_server

INSTRUCTIONS = "python-tests/openai_suite.toml does not agree with what the suite does:\n"


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    kept = os.environ.get("OPENAI_SUITE_DIR")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("suite")
    folder.mkdir(parents=True, exist_ok=True)
    return openai_suite.fetch(folder)


def server_for(model, folder):
    if model.startswith("text-embedding"):
        return embedding_server(model, folder)
    return GensetServer("--model-name", model, "--model-path", str(MODEL), "--token-echo-delay-ms", "0")


@pytest.fixture(scope="module")
def outcomes(suite, tmp_path_factory):
    outcomes = {}
    for model, files in openai_suite.FILES.items():
        folder = tmp_path_factory.mktemp("model")
        with server_for(model, folder) as server:
            outcomes |= openai_suite.run(suite, files, server.url, folder)
            assert server.stop() == 0, server.output
    return outcomes


def disagreements(outcomes, run, with_values, left_out):
    for test, (outcome, why, is_filled) in outcomes.items():
        lists = [
            known for known in (run, with_values, left_out) for name in openai_suite.names(test) if name in known
        ]
        if len(lists) != 1:
            yield f"{test} {outcome}, and is in {len(lists)} lists"
        elif lists[0] is left_out:
            if outcome != "failed":
                yield f"{test} is left out and {outcome}"
        elif outcome != "passed":
            yield f"{test} {outcome}: {why}"
        elif is_filled != (lists[0] is with_values):
            yield f"{test} was {'' if is_filled else 'not '}given values"


def test_every_test_of_the_suite_does_what_the_list_says(outcomes):
    run, with_values, left_out = openai_suite.listed()
    found = {name for test in outcomes for name in openai_suite.names(test)}
    known = run | with_values | left_out.keys()
    unknown = [f"{test} is in no file of the suite" for test in sorted(known) if test not in found]
    problems = [*disagreements(outcomes, run, with_values, left_out), *unknown]
    assert not problems, INSTRUCTIONS + "\n".join(problems)
