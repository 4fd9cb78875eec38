"""`python -m genset.sample_main --model-name NAME`: a worker whose engine answers with rotating token ids, to try a fleet with."""

from __future__ import annotations

import argparse
import os
import sys

from genset._model_files import is_only_a_name
from genset.backend import find_binary


def command(arguments: list[str]) -> list[str]:
    """The command that replaces this process."""
    parser = argparse.ArgumentParser(prog="python -m genset.sample_main", description=__doc__)
    parser.add_argument("--model-name", default="sample", help="what clients call the model")
    parser.add_argument(
        "--model-path",
        help="folder with a tokenizer, GGUF file, or name of the Hugging Face Hub; default: --model-name if that is one, else the built-in tokenizer",
    )
    parser.add_argument("--namespace", default="genset")
    known, rest = parser.parse_known_args(arguments)
    path = known.model_path
    if path is None and not is_only_a_name(known.model_name):
        path = known.model_name
    if path is None:
        print(f"{known.model_name}: no --model-path, so the tokenizer is the built-in model's", file=sys.stderr)
    where = [] if path is None else ["--model-path", path]
    return [find_binary(), "run", f"in=dyn://{known.namespace}", "out=sample", "--model-name", known.model_name, *where, *rest]


def main() -> None:
    """Replaces this process with the worker."""
    words = command(sys.argv[1:])
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
