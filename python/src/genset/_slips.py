"""Common mistakes in engines, each reported in one sentence. Used by the callers of an engine's methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from genset.engine import EngineConfig, LLMEngine, WorkerConfig


def check_engine(engine: LLMEngine) -> None:
    """Raises TypeError if `generate` cannot answer. Any object with an engine's methods is an engine."""
    if isinstance(engine, type) or not all(callable(getattr(engine, name, None)) for name in ("start", "generate", "cleanup")):
        raise TypeError(f"{engine!r} is no engine: give an instance of a subclass of LLMEngine")
    name, generate = f"{type(engine).__name__}.generate", engine.generate
    if inspect.iscoroutinefunction(generate):
        raise TypeError(f"{name} returns its answer: write `yield` for each chunk of it")
    if inspect.isgeneratorfunction(generate):
        raise TypeError(f"{name} is a generator without `async`: write `async def generate`")
    try:
        inspect.signature(generate).bind(None, None)
    except ValueError:
        pass  # A C callable with an unknown signature.
    except TypeError:
        raise TypeError(f"{name} takes other arguments than it is given: write `async def generate(self, request, context)`") from None


def check_chunks(chunks: Any, engine: LLMEngine) -> None:
    """Raises TypeError if `generate` returned no async generator or other async iterator."""
    if not hasattr(chunks, "__aiter__"):
        kind = type(chunks).__name__
        raise TypeError(f"{type(engine).__name__}.generate gave a {kind} and no async generator: write `async def` and `yield` each chunk")


async def called(method: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of an engine's method; raises TypeError if the method is no `async def`."""
    result = method(*arguments)
    if not inspect.isawaitable(result):
        name = getattr(method, "__name__", "it")
        raise TypeError(f"{getattr(method, '__qualname__', name)} gave a {type(result).__name__} that cannot be awaited: write `async def {name}`")
    return await result


async def started(engine: LLMEngine, worker_id: int) -> EngineConfig:
    """Starts an engine; raises TypeError if it cannot work."""
    check_engine(engine)
    config = await called(engine.start, worker_id)
    if not isinstance(config, EngineConfig):
        raise TypeError(f"{type(engine).__name__}.start gave a {type(config).__name__}: return an EngineConfig")
    return config


async def made(engine_class: type[LLMEngine], argv: list[str] | None) -> tuple[LLMEngine, WorkerConfig]:
    """Returns the result of `from_args`; raises TypeError if it is not an engine with its config."""
    given = await called(engine_class.from_args, argv)
    if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], WorkerConfig)):
        name = getattr(engine_class, "__name__", engine_class)
        raise TypeError(f"{name}.from_args gave a {type(given).__name__}: return the engine and its WorkerConfig, `return cls(...), WorkerConfig(...)`")
    engine, config = given
    check_engine(engine)
    return engine, config
