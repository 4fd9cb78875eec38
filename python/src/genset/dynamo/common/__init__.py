"""The names of `dynamo.common`."""
