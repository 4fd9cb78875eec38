"""Where the files of a model are: a folder, or what a download left in the cache of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from genset.exceptions import InvalidArgument, Unsupported

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
"""What a frontend needs of a model."""


UNBOUNDED_TOKENS = 1 << 30
"""The context of a model of which nothing says how long it is: longer than any prompt."""


def context_length(model_path: str) -> int | None:
    """What `config.json` of a model's folder says; None where it says nothing, or there is no such folder."""
    try:
        with (Path(model_path) / "config.json").open() as file:
            length = json.load(file).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return length if isinstance(length, int) and length > 0 else None


def name_of(model_path: str) -> str:
    """The name clients use where none is given: of the repository, the folder or the GGUF file."""
    path = Path(model_path.removeprefix("hf://"))
    resolved = path.resolve() if path.exists() else path
    return resolved.stem if resolved.suffix == ".gguf" else resolved.name


def find(model_path: str) -> str:
    """The folder with the model's tokenizer and template. May download them, so it is not for an event loop's thread.

    Raises `InvalidArgument` where there is none, saying what to do.
    """
    path = Path(model_path)
    if path.is_dir():
        return str(path)
    if path.is_file():
        if path.suffix == ".gguf":
            raise Unsupported(
                f"{path} is a GGUF file: register_llm publishes the tokenizer of a folder. "
                "Give the folder of the same model with tokenizer.json as model_path, and the file to your engine",
                field="model_path",
            )
        raise InvalidArgument(f"{path} is a file; give the folder of a model", field="model_path")
    hub_id = model_path.removeprefix("hf://")
    if not _HUB_ID.fullmatch(hub_id):
        raise InvalidArgument(f"{model_path} is neither a folder nor a name like Qwen/Qwen3-0.6B", field="model_path")
    return _cached(hub_id) or _downloaded(hub_id)


def _cached(hub_id: str) -> str | None:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    reference = repository / "refs" / "main"
    if not reference.is_file():
        return None
    folder = repository / "snapshots" / reference.read_text().strip()
    return str(folder) if all((folder / name).is_file() for name in FILES[:3]) else None


def _downloaded(hub_id: str) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InvalidArgument(
            f"{hub_id} is not in the cache of the Hub, and huggingface_hub is not installed: "
            "`pip install huggingface_hub`, or download the model and give its folder",
            field="model_path",
        ) from None
    return str(snapshot_download(hub_id, allow_patterns=FILES))
