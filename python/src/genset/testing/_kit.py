"""The conformance kit in pytest: `genset conform` runs once, and each check is one test."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from genset.backend.run import BINARY_VARIABLE, located_binary, missing_binary

_GOOD = ("pass", "expected_fail", "measured")
# The test for problems that no check's own test reports.
_REPORT = "report"


class ConformanceRun:
    """One run of the kit on an engine. It begins when its first result is requested."""

    def __init__(
        self,
        engine: str | Sequence[str],
        *,
        level: str = "strict",
        only: Sequence[str] = (),
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """`engine` is its command, as a line or as words; a first word of `python` is this interpreter. `only`: ids of checks, or their
        prefixes. `arguments`: further arguments of `genset conform run`. `env`: variables for the engine.
        `timeout`: seconds that the run may take."""
        words = shlex.split(engine) if isinstance(engine, str) else list(engine)
        if words[:1] in (["python"], ["python3"]):
            words[0] = sys.executable
        self._engine = shlex.join(words)
        self._level = level
        self._only = list(only)
        self._arguments = list(arguments)
        self._env = {**os.environ, **(env or {})}
        self._timeout = timeout
        self._report: dict[str, Any] | None = None
        self._problem: str | None = None

    def ids(self) -> list[str]:
        """The ids of all checks up to `level` that `only` selects.

        Raises `FileNotFoundError` if there is no `genset`, `ValueError` if `only` names no check.
        """
        listed = self._genset("conform", "list", "--json")
        if listed.returncode != 0:
            raise RuntimeError(f"`genset conform list` failed: {listed.stderr.strip()}")
        checks = [json.loads(line) for line in listed.stdout.splitlines()]
        for prefix in self._only:
            if not any(check["id"].startswith(prefix) for check in checks):
                raise ValueError(f"no check's id starts with {prefix!r}; `genset conform list` lists them")
        highest = {"core": 1, "strict": 2, "soak": 3}[self._level]
        wanted = tuple(self._only) or ("",)
        ids = [check["id"] for check in checks if 1 <= check["level"] <= highest and check["id"].startswith(wanted)]
        if not ids:
            raise ValueError(f"no check up to level {self._level} has an id that starts with {' or '.join(wanted)}")
        return ids

    def result(self, check: str) -> dict[str, Any]:
        """The result of one check, as in the report.

        Raises `RuntimeError`, on every call, if the kit itself could not run.
        """
        for row in self._done()["checks"]:
            if row["id"] == check:
                found: dict[str, Any] = row
                return found
        raise RuntimeError(f"the report has no check {check}")

    def problems(self) -> list[str]:
        """The failures of the run beside the checks of `ids()`: invalid waivers, and violations of rules for every stream whose own check
        was left out.

        Raises `RuntimeError` as `result` does.
        """
        report, told = self._done(), set(self.ids())
        others = [row for row in report["checks"] if row["id"] not in told]
        broken = [_told(row) for row in others if row["verdict"] not in (*_GOOD, "skip")]
        return [*report.get("waiver_problems", []), *broken]

    def _done(self) -> dict[str, Any]:
        if self._problem is not None:
            raise RuntimeError(self._problem)
        if self._report is None:
            try:
                self._report = self._run()
            except RuntimeError as error:
                self._problem = str(error)
                raise
        return self._report

    def _run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            words = ["conform", "run", "--engine-cmd", self._engine, "--level", self._level, "--json", str(report)]
            if self._only:
                words += ["--only", ",".join(self._only)]
            run = self._genset(*words, *self._arguments)
            # 1 means that a check failed, which is a result.
            if run.returncode not in (0, 1) or not report.exists():
                raise RuntimeError(f"`genset {shlex.join(words)}` failed: {run.stderr.strip() or run.stdout.strip()}")
            told: dict[str, Any] = json.loads(report.read_text())
        return told

    def _genset(self, *words: str) -> subprocess.CompletedProcess[str]:
        binary = located_binary(self._env)
        if binary is None:
            raise FileNotFoundError(missing_binary(self._env.get(BINARY_VARIABLE)))
        try:
            return subprocess.run(
                [binary, *words], env=self._env, capture_output=True, text=True, timeout=self._timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            late = f"did not end within {self._timeout:g} s; `timeout=` of the run gives it more"
            raise RuntimeError(f"`genset {shlex.join(words)}` {late}") from error


def conformance_tests(engine: str | Sequence[str], **options: Any) -> Callable[..., None]:
    """Makes a pytest test of every check, for a name that begins with `test_`, and one of the report, which fails for invalid waivers and
    for broken rules whose own check was left out. Takes the arguments of `ConformanceRun`.

    Without the `genset` binary, or if `only` names no check, there is one test, which fails and says what to do.
    """
    import pytest

    run = ConformanceRun(engine, **options)
    problem: str | None = None
    try:
        ids = [*run.ids(), _REPORT]
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        problem, ids = str(error), ["kit"]

    @pytest.mark.parametrize("check", ids)
    def test(check: str) -> None:
        if problem is not None:
            pytest.fail(problem, pytrace=False)
        try:
            if check == _REPORT:
                problems = run.problems()
                if problems:
                    pytest.fail("\n".join(problems), pytrace=False)
                return
            result = run.result(check)
        except RuntimeError as error:
            pytest.fail(str(error), pytrace=False)
        if result["verdict"] == "skip":
            pytest.skip(result["reason"])
        if result["verdict"] not in _GOOD:
            pytest.fail(_told(result), pytrace=False)

    return test


def _told(result: dict[str, Any]) -> str:
    reason = result.get("reason", "")
    if result["verdict"] == "unexpected_pass":
        reason = f"it passes; remove the waiver ({result['waiver']})"
    elif result.get("is_precondition"):
        reason = f"could not be tried: {reason}"
    text = f"{result['id']}: {reason}\n`genset conform explain {result['id']}` says what it is about"
    if result.get("transcript"):
        text += "\n" + json.dumps(result["transcript"], indent=1)
    return text
