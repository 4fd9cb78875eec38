"""`genset.testing` with a stand-in for the binary; `conformance_tests/` runs the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from genset.testing import ConformanceRun, StubContext, conformance_tests
from genset.testing._kit import _told

CHECKS = [("LC01", 1), ("CN11", 3), ("ST01", 1), ("ST09", 2), ("PF01", 0)]
VERDICTS: dict[str, dict[str, Any]] = {
    "LC01": {"verdict": "pass"},
    "ST01": {"verdict": "fail", "reason": "nothing came", "transcript": {"events": []}},
    "ST09": {"verdict": "skip", "reason": "not declared"},
}

FAKE = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["conform", "list"]:
    for id, level in {checks!r}:
        print(json.dumps({{"id": id, "level": level}}))
elif "no-such-engine" in sys.argv[4]:
    sys.exit("error: the engine does not start")
else:
    path = sys.argv[sys.argv.index("--json") + 1]
    checks = [dict(verdict, id=id) for id, verdict in {verdicts!r}.items()]
    problems = ["ST01: the waiver ended on 2020-01-31"] if "--waivers" in sys.argv else []
    json.dump({{"checks": checks, "waiver_problems": problems}}, open(path, "w"))
    sys.exit(1)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `genset` that logs its arguments."""
    binary, log = tmp_path / "genset", tmp_path / "log"
    binary.write_text(FAKE.format(python=sys.executable, log=str(log), checks=CHECKS, verdicts=VERDICTS))
    binary.chmod(0o755)
    monkeypatch.setenv("GENSET_BIN", str(binary))
    return log


def asked(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_there_is_a_test_of_each_check_up_to_the_level(log: Path) -> None:
    assert ConformanceRun("engine").ids() == ["LC01", "ST01", "ST09"]
    assert ConformanceRun("engine", level="core", only=["ST"]).ids() == ["ST01"]
    assert ConformanceRun("engine", level="soak").ids() == ["LC01", "CN11", "ST01", "ST09"]


def test_the_kit_runs_once_and_checks_are_told_apart(log: Path) -> None:
    test = conformance_tests("python 'my engine.py'")
    test("LC01")
    with pytest.raises(pytest.fail.Exception, match="ST01: nothing came"):
        test("ST01")
    with pytest.raises(pytest.skip.Exception, match="not declared"):
        test("ST09")
    runs = [words for words in asked(log) if words[1] == "run"]
    assert len(runs) == 1
    assert runs[0][2:4] == ["--engine-cmd", f"{sys.executable} 'my engine.py'"]


def test_the_report_is_a_test_of_what_no_check_tells(log: Path) -> None:
    conformance_tests("engine")("report")
    with pytest.raises(pytest.fail.Exception, match="ST01: nothing came"):
        conformance_tests("engine", only=["LC"])("report")
    with pytest.raises(pytest.fail.Exception, match="the waiver ended on"):
        conformance_tests("engine", arguments=["--waivers", "conformance.toml"])("report")
    with pytest.raises(pytest.fail.Exception, match="does not start"):
        conformance_tests("no-such-engine")("report")


def test_checks_that_are_not_there_are_no_empty_set(log: Path) -> None:
    with pytest.raises(ValueError, match="no check's id starts with 'st01'; `genset conform list` lists them"):
        ConformanceRun("engine", only=["ST", "st01"]).ids()
    with pytest.raises(ValueError, match="no check up to level strict has an id that starts with CN"):
        ConformanceRun("engine", only=["CN"]).ids()
    with pytest.raises(pytest.fail.Exception, match="no check's id starts with 'st01'"):
        conformance_tests("engine", only=["st01"])("kit")


def test_a_kit_that_cannot_run_fails_each_test_and_is_not_run_again(log: Path) -> None:
    test = conformance_tests(["no-such-engine"])
    for check in ("LC01", "ST01"):
        with pytest.raises(pytest.fail.Exception, match="does not start"):
            test(check)
    assert len([words for words in asked(log) if words[1] == "run"]) == 1


def test_without_the_binary_one_test_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSET_BIN", "/no/such/genset")
    test = conformance_tests("python engine.py")
    with pytest.raises(pytest.fail.Exception, match="GENSET_BIN=/no/such/genset is no program. Build it with"):
        test("kit")


def test_a_run_that_takes_too_long_names_the_argument(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(words: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(words, options["timeout"])

    run = ConformanceRun("engine", timeout=0.5)
    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(RuntimeError, match="did not end within 0.5 s; `timeout=` of the run gives it more"):
        run.result("ST01")


def test_the_binary_that_was_installed_with_the_package_need_not_be_in_path(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENSET_BIN")
    monkeypatch.setenv("PATH", "")
    # As in a virtual environment that is not activated.
    monkeypatch.setattr("sysconfig.get_path", {"scripts": str(log.parent)}.get)
    assert ConformanceRun("engine").ids() == ["LC01", "ST01", "ST09"]


def test_a_failure_says_what_to_do() -> None:
    passes = {"id": "CN04", "verdict": "unexpected_pass", "waiver": "prefill is one call, until 2027-06-30"}
    assert _told(passes).startswith("CN04: it passes; remove the waiver (prefill is one call, until 2027-06-30)\n")
    untried = {"id": "CN04", "verdict": "fail", "reason": "start failed: no device", "is_precondition": True}
    assert _told(untried).startswith("CN04: could not be tried: start failed: no device\n")


def test_a_stub_context_stops_when_told() -> None:
    context = StubContext(headers={"x": "y"})
    assert (context.id(), context.is_stopped(), context.headers["x"]) == ("test", False, "y")
    context.stop()
    assert (context.is_stopped(), context.stop_reason()) == (True, "client")
    assert StubContext(stopped=True).is_stopped()
