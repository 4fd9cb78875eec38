"""The names of `dynamo.common.backend.worker`."""

from genset.backend.worker import Worker
from genset.engine import WorkerConfig

__all__ = ["Worker", "WorkerConfig"]
