"""`genset offer NAME ENDPOINT`: offers a running endpoint behind HTTP as a model, for as long as it runs.

The endpoint gets the bodies of chats as their clients sent them, and answers with text or OpenAI's objects, as a handler of
`ModelType.Chat` does. It needs no change. A worker that registers its model needs no such command.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from genset._forms import Generating
from genset.exceptions import EngineError, InvalidArgument
from genset.llm import ModelType, register_llm
from genset.runtime import Context, Runtime, serve_until_signalled

logger = logging.getLogger(__name__)

KINDS = {"chat": ModelType.Chat, "completions": ModelType.Completion}


async def offer(runtime: Runtime, name: str, path: str, kind: ModelType = ModelType.Chat) -> None:
    """Offers the endpoint at `path` as the model `name`, until the runtime shuts down.

    Raises `Unavailable` if it has no instance within a minute, and `InvalidArgument` if it serves a model that takes no bodies.
    """
    asked = runtime.endpoint(path)
    client = await asked.client()
    await client.wait_for_instances()
    if isinstance(client._known_form(), Generating):
        raise InvalidArgument(f"{asked.name} serves a model, which takes no bodies of chats; frontends list it without this command")

    async def forward(body: Any, context: Context) -> AsyncIterator[Any]:
        async for item in client.round_robin(body, context=context):
            yield item

    namespace, component, endpoint = asked.path
    # A component of its own: the endpoint's name is taken.
    at = runtime.namespace(namespace).component(f"{component}-{endpoint}").endpoint("offered")
    await register_llm(kind, at, "", name)
    logger.info("%s is offered as %s", asked.name, name)
    await at.serve_endpoint(forward)


def kind_of(text: str) -> ModelType:
    """Parses `--endpoint-types`."""
    kind = ModelType(0)
    for name in text.split(","):
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(KINDS)}")
        kind |= KINDS[name]
    return kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 2 for an invalid offer, 1 if the endpoint is absent."""
    parser = argparse.ArgumentParser(prog="genset offer", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="what clients call the model")
    parser.add_argument("endpoint", metavar="ENDPOINT", help="NAMESPACE.COMPONENT.ENDPOINT, as its process serves it")
    parser.add_argument(
        "--endpoint-types", metavar="TYPES", type=kind_of, default=ModelType.Chat, help="chat, completions, or both with a comma; else chat"
    )
    parsed = parser.parse_args(arguments)
    try:
        asyncio.run(serve_until_signalled(lambda runtime: offer(runtime, parsed.name, parsed.endpoint, parsed.endpoint_types)))
    except (EngineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument | ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
