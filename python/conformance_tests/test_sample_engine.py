"""The conformance kit on the sample engine, one test per check. Needs the `genset` binary; `cargo xtask test python-kit` builds it.

Runs two groups of checks: `engines/subprocess/tests/conformance.rs` runs all of them on the same engine.
"""

from pathlib import Path

from genset.testing import conformance_tests

PACKAGE = Path(__file__).parent.parent

test_conformance = conformance_tests(
    # Tokens take a while, so that an answer can be cancelled before its end.
    ["python", str(PACKAGE / "sample_engine.py"), "--token-delay-ms", "1"],
    env={"PYTHONPATH": str(PACKAGE / "src")},
    only=["LC", "ST"],
)
