"""Puts the native module and the `genset` binary into the wheel, if `cargo xtask wheel` has placed them beside the package. Without
them the wheel is pure Python."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "src/genset/_native.abi3.so"
BINARY = "bin/genset"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Marks the wheel as built for this platform and any Python from 3.10 on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if not (root / NATIVE).is_file():
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        build_data["shared_scripts"][str(root / BINARY)] = "genset"
