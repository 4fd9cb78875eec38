"""Finds the workers in a discovery directory, as docs/wire-protocol.md describes it.

It reads the directory only when called. A long-running client would poll a few times a second and remember the leases, so
that it need not wait to judge one.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

STORE_VERSION = "1"
LEASE_HEAD = b"genset-lease 1 "
KEY_PREFIX = "genset/v1/instances/"

# A lease's modification time, inode and length. They change when its holder beats or writes.
Mark = tuple[int, int, int]


class DiscoveryError(Exception):
    """The directory holds no store, or one of another version."""


@dataclass(frozen=True)
class Instance:
    """One endpoint that one worker serves."""

    endpoint: str
    id: int
    host: str
    port: int
    card: dict[str, Any] | None
    """The model that it serves; present for `generate` endpoints."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        name = record["endpoint"]
        process, _, _ = record["address"]["location"].rpartition("/")
        host, _, port = process.rpartition(":")
        return cls(
            endpoint=f"{name['namespace']}.{name['component']}.{name['endpoint']}",
            id=record["instance"],
            host=host.strip("[]"),
            port=int(port),
            card=record.get("card"),
        )

    def sibling(self, endpoint: str) -> str:
        """The full name of another endpoint of the same component."""
        return f"{self.endpoint.rpartition('.')[0]}.{endpoint}"


def list_instances(directory: str | os.PathLike[str], time_to_live: float = 2.0) -> list[Instance]:
    """Returns the live instances that speak TCP, ordered by endpoint and id.

    Blocks for up to `time_to_live` seconds if a lease can be judged only by watching it.
    """
    newest: dict[str, tuple[int, str, bytes]] = {}
    for path in live_leases(Path(directory), time_to_live):
        with contextlib.suppress(FileNotFoundError):  # Its holder has just left.
            for key, stamp, value in entries(path.read_bytes()):
                newest[key] = max(newest.get(key, (-1, "", b"")), (stamp, path.name, value))
    records = [json.loads(value) for key, (_, _, value) in newest.items() if key.startswith(KEY_PREFIX)]
    instances = [Instance.from_record(record) for record in records if record["address"]["plane"] == "tcp"]
    return sorted(instances, key=lambda instance: (instance.endpoint, instance.id))


def live_leases(directory: Path, time_to_live: float) -> list[Path]:
    """Returns the files of live leases: written within the time to live, or seen to change during it."""
    check_store(directory)
    first = lease_marks(directory)
    alive = {path for path, mark in first.items() if abs(time.time() - mark[0] / 1e9) < time_to_live}
    deadline = time.monotonic() + time_to_live
    while len(alive) < len(first) and time.monotonic() < deadline:
        time.sleep(0.05)
        now = lease_marks(directory)
        alive |= {path for path, mark in first.items() if now.get(path, mark) != mark}
    return sorted(alive)


def check_store(directory: Path) -> None:
    try:
        version, _id = (directory / "genset-discovery").read_text().split()
    except (FileNotFoundError, ValueError) as error:
        raise DiscoveryError(f"{directory} holds no discovery store") from error
    if version != STORE_VERSION:
        raise DiscoveryError(f"{directory} holds a discovery store of version {version}, not {STORE_VERSION}")


def lease_marks(directory: Path) -> dict[Path, Mark]:
    marks = {}
    for path in directory.glob("*.lease"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            marks[path] = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
    return marks


def entries(lease: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yields key, stamp and value of each entry in a lease file."""
    head, listed, values = lease.split(b"\n", 2)
    if not head.startswith(LEASE_HEAD):
        raise DiscoveryError("a lease of another version")
    start = 0
    for entry in json.loads(listed):
        end = start + entry["length"]
        yield entry["key"], entry["stamp"], values[start:end]
        start = end
