"""The names of NVIDIA Dynamo's Python library, for programs that come from there: change `dynamo.` to `genset.dynamo.` in their
import lines. New programs use `genset.runtime`, `genset.llm` and `genset.sdk`.
"""

from __future__ import annotations

from collections.abc import Mapping


def absent(module: str, name: str, known: Mapping[str, str]) -> Exception:
    """The error of a name that is not here; what to do where there is another way."""
    if name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    instead = known.get(name, "docs/guide/coming-from-dynamo.md lists what is there")
    return ImportError(f"{module} has no {name}: {instead}")
