"""The names of `dynamo._core` that programs import."""

from genset.dynamo.runtime import Client, Component, Context, DistributedRuntime, Endpoint, Namespace

__all__ = ["Client", "Component", "Context", "DistributedRuntime", "Endpoint", "Namespace"]
