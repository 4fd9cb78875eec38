"""The names of `dynamo.common`."""

from __future__ import annotations

from typing import Any

from genset.dynamo import absent


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, {}, submodules=("backend",))
