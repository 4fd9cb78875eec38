"""`run` of `dynamo.common.backend.run`."""

from genset.backend.run import run

__all__ = ["run"]
