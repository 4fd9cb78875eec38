"""The names of NVIDIA Dynamo's Python library, for programs written for it: change `dynamo.` to `genset.dynamo.` in their
imports. New programs use `genset.runtime`, `genset.llm` and `genset.sdk`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder

_GUIDE = "docs/guide/coming-from-dynamo.md lists what is there"

_INSTEAD = {
    "llmctl": "frontends find models by themselves; `genset models` lists them, and `genset offer` offers a running endpoint",
    "mocker": "run `genset run in=dyn://NAMESPACE out=mocker MODEL`",
    "nixl_connect": "workers move KV blocks by themselves: `genset run --role prefill`, and `decode`",
    "planner": "there is no planner; `genset top` shows a fleet's load",
    "router": "frontends route by themselves: `genset run in=http out=dyn --router-mode kv`",
    "sglang": "run `genset run in=dyn://NAMESPACE out=sglang MODEL`",
    "trtllm": "run `genset run in=dyn://NAMESPACE out=trtllm MODEL`",
    "vllm": "run `genset run in=dyn://NAMESPACE out=vllm MODEL`",
}
"""Missing modules, by the name after `genset.dynamo.`, with what to do instead."""


def absent(module: str, name: str, known: Mapping[str, str], submodules: Collection[str] = ()) -> Exception:
    """The error for a missing name, with what to do instead if there is another way. One of `submodules` may not be imported yet: it is an
    AttributeError, after which Python imports it. So is a private name, for which `help` looks."""
    if name.startswith("_") or name in submodules:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module} has no {name}: {known.get(name, _GUIDE)}")


def __getattr__(name: str) -> object:
    # `from genset.dynamo import vllm` asks here first. An existing submodule that is not imported yet must not raise the error.
    if name in _INSTEAD:
        raise absent(__name__, name, _INSTEAD)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _AbsentModules(MetaPathFinder):
    """The last finder for modules of this package: raises an error that says what to use instead."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        prefix = f"{__name__}."
        if fullname.startswith(prefix):
            instead = _INSTEAD.get(fullname.removeprefix(prefix).split(".")[0], _GUIDE)
            raise ModuleNotFoundError(f"there is no {fullname}: {instead}", name=fullname)


sys.meta_path.append(_AbsentModules())
