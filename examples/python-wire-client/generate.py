"""Sends token ids to a worker and prints the tokens that it answers with, as they come."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from genset_discovery import DiscoveryError, Instance, list_instances
from genset_wire import Connection, WireError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=int, nargs="+", metavar="ID", help="token ids of the prompt")
    parser.add_argument("--discovery", required=True, metavar="DIR", help="the directory given as --discovery-path")
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="the file given as --wire-secret-file")
    parser.add_argument("--model", metavar="NAME", help="the model to ask [default: the first one listed]")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="tokens to generate [default: 16]")
    return parser.parse_args()


def find_worker(directory: str, model: str | None) -> tuple[Instance, str]:
    """The first worker that serves the model, and the model's name there."""
    for instance in list_instances(directory):
        if (card := instance.card) and model in (None, card["name"], *card.get("aliases", [])):
            return instance, card["name"]
    raise DiscoveryError(f"no worker in {directory} serves {model or 'a model'}")


async def generate(worker: Instance, secret: bytes | None, request: dict[str, Any]) -> None:
    async with (
        await Connection.open(worker.host, worker.port, secret) as connection,
        await connection.call(worker.endpoint, worker.id, request) as stream,
    ):
        async for item in stream:
            chunk = item["tokens"] if "tokens" in item else item["finished"]["last"]
            print(*chunk["token_ids"], sep="\n", end="\n" if chunk["token_ids"] else "", flush=True)
            if finished := item.get("finished"):
                usage = finished["usage"]
                print(
                    f"{finished['reason']}: {usage['prompt_tokens']} prompt tokens,"
                    f" {usage['completion_tokens']} completion tokens",
                    file=sys.stderr,
                )


def main() -> int:
    arguments = parse_arguments()
    try:
        worker, model = find_worker(arguments.discovery, arguments.model)
        secret = arguments.secret_file.read_bytes() if arguments.secret_file else None
        stop = {"max_tokens": arguments.max_tokens}
        request = {"model": model, "input": {"tokens": arguments.tokens}, "stop": stop}
        asyncio.run(generate(worker, secret, request))
    except (DiscoveryError, WireError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
