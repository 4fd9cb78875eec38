"""Where the files of a model are: a folder, or what a download left in the cache of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re

from genset.exceptions import InvalidArgument

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
"""What a frontend needs of a model."""


UNBOUNDED_TOKENS = 1 << 30
"""The context of a model of which nothing says how long it is: longer than any prompt."""


def context_length(model_path: str) -> int | None:
    """What `config.json` of a model says, in its folder or in the cache of the Hub; None where it says nothing, or there is none."""
    folder = model_path if os.path.isdir(model_path) else _snapshot(model_path.removeprefix("hf://"))
    try:
        with open(os.path.join(folder or model_path, "config.json")) as file:
            length = json.load(file).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return length if isinstance(length, int) and length > 0 else None


def name_of(model_path: str) -> str:
    """The name clients use where none is given: of the repository, the folder or the GGUF file."""
    path = model_path.removeprefix("hf://")
    name = os.path.basename(os.path.realpath(path) if os.path.exists(path) else path.rstrip("/"))
    return name.removesuffix(".gguf")


def is_gguf(model_path: str) -> bool:
    """Whether it is a GGUF file."""
    return model_path.lower().endswith(".gguf") and os.path.isfile(model_path)


def find(model_path: str) -> str:
    """The folder with the model's tokenizer and template, or the GGUF file that they are in. May download them, so it is not for an
    event loop's thread.

    Raises `InvalidArgument` where there is none, saying what to do.
    """
    if os.path.isdir(model_path):
        return model_path
    if os.path.isfile(model_path):
        if is_gguf(model_path):
            return model_path
        raise InvalidArgument(f"{model_path} is a file; give the folder of a model, or a GGUF file", field="model_path")
    hub_id = model_path.removeprefix("hf://")
    if not _HUB_ID.fullmatch(hub_id):
        raise InvalidArgument(f"{model_path} is neither a folder, a GGUF file nor a name like Qwen/Qwen3-0.6B", field="model_path")
    return _cached(hub_id) or _downloaded(hub_id)


def _cached(hub_id: str) -> str | None:
    folder = _snapshot(hub_id)
    is_whole = folder is not None and all(os.path.isfile(os.path.join(folder, name)) for name in FILES[:3])
    return folder if is_whole else None


def _snapshot(hub_id: str) -> str | None:
    """Where the cache of the Hub has a repository, whole or not."""
    if not _HUB_ID.fullmatch(hub_id):
        return None
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    repository = os.path.join(cache, "models--" + hub_id.replace("/", "--"))
    try:
        with open(os.path.join(repository, "refs", "main")) as reference:
            return os.path.join(repository, "snapshots", reference.read().strip())
    except OSError:
        return None


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
