"""`python -m genset.dynamo.frontend`: as `python -m genset.frontend`, with those flags of Dynamo's that have another name here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from genset import frontend

__all__ = ["main"]

_RENAMED = {"--tls-cert-path": "--http-tls-cert", "--tls-key-path": "--http-tls-key", "--router-ttl": "--kv-approx-ttl"}


def translated(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The word after `out=` and the flags of `genset run`. Flags that are unknown here stay as they are."""
    parser = argparse.ArgumentParser(prog="python -m genset.dynamo.frontend", add_help=False, allow_abbrev=False)
    parser.add_argument("--namespace")
    for flag, follows in (("--kv-events", "true"), ("--no-kv-events", "false")):
        parser.add_argument(flag, action="store_const", const=follows, dest="kv_events")
    for flag in _RENAMED:
        parser.add_argument(flag, dest=flag)
    known, rest = parser.parse_known_args(arguments)
    named = {_RENAMED[flag]: getattr(known, flag) for flag in _RENAMED} | {"--use-kv-events": known.kv_events}
    flags = [f"{flag}={value}" for flag, value in named.items() if value is not None]
    return f"dyn://{known.namespace}" if known.namespace else "dyn", [*flags, *rest]


def main() -> None:
    """Replaces this process with the frontend."""
    workers, arguments = translated(sys.argv[1:])
    frontend.become(arguments, workers)


if __name__ == "__main__":
    main()
