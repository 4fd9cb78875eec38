"""The conformance kit on the sample engine, a test a check. Needs the `genset` binary; `cargo xtask test python-kit` builds it.

Two groups of the checks: `engines/subprocess/tests/conformance.rs` runs all of them on the same engine.
"""

from pathlib import Path

from genset.testing import conformance_tests

PACKAGE = Path(__file__).parent.parent

test_conformance = conformance_tests(
    # A token takes a while, so that an answer can be cancelled on the way.
    ["python", str(PACKAGE / "sample_engine.py"), "--token-delay-ms", "1"],
    env={"PYTHONPATH": str(PACKAGE / "src")},
    only=["LC", "ST"],
)
