"""As test_sample_engine.py, but with all checks, on the engine whose steps serve many requests."""

from pathlib import Path

from genset.testing import conformance_tests

PACKAGE = Path(__file__).parent.parent

test_conformance = conformance_tests(
    ["python", str(PACKAGE / "batching_engine.py"), "--step-ms", "1"],
    env={"PYTHONPATH": str(PACKAGE / "src")},
)
