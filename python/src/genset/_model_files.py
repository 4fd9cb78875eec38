"""Locates a model's files: in a folder, or in the cache of the Hugging Face Hub. `genset pull` downloads."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from genset.exceptions import InvalidArgument

Download = subprocess.Popen[str]

FILES = ["config.json", "tokenizer.json", "tokenizer_config.json"]
"""The files of a model that a frontend needs."""

UNBOUNDED_TOKENS = 1 << 30
"""The context length of a model that states none: longer than any prompt."""

_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal configs keep the config of their language model."""

_USUAL_CONTEXTS = {"gemma3_text": 131_072}
"""Defaults of transformers that configs leave out, by `model_type`."""

_HUB_NAME = re.compile(
    r"(?:hf://)?(?P<repo>[A-Z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>(?!.*\.\.).+\.gguf)|:(?P<quantization>[\w.-]+))?",
    re.ASCII | re.IGNORECASE,
)


class HubName(NamedTuple):
    """A model of the Hub: `ORG/NAME`, `ORG/NAME@REVISION`, `ORG/NAME:QUANTIZATION`, `ORG/NAME/FILE.gguf`, with `hf://` before it or not."""

    repo: str
    revision: str
    """A branch, tag or commit."""
    file: str | None
    quantization: str | None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parses a name; None if it is no such name."""
        found = _HUB_NAME.fullmatch(text)
        return found and cls(found["repo"], found["revision"] or "main", found["file"], found["quantization"])

    @property
    def names_gguf(self) -> bool:
        """Whether it names a GGUF file."""
        return self.file is not None or self.quantization is not None

    def snapshot(self) -> str | None:
        """The revision's folder in the cache, complete or not."""
        repository = os.path.join(_cache(), "models--" + self.repo.replace("/", "--"))
        try:
            with open(os.path.join(repository, "refs", self.revision)) as reference:
                commit = reference.read().strip()
        except OSError:
            # There is no such reference: the revision is a commit.
            commit = self.revision
        folder = os.path.join(repository, "snapshots", commit)
        return folder if os.path.isdir(folder) else None

    def cached(self) -> str | None:
        """The folder or file in the cache, if everything needed is there."""
        folder = self.snapshot()
        # Only the repository's file list says which file a quantization is.
        if folder is None or self.quantization is not None:
            return None
        if self.file is not None:
            file = os.path.join(folder, self.file)
            return file if os.path.isfile(file) else None
        return folder if all(os.path.isfile(os.path.join(folder, name)) for name in FILES) else None


def _cache() -> str:
    """The cache folder of the Hub's tools."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")


def context_length(model_path: str) -> int | None:
    """The context length in a model's `config.json`, in its folder or in the Hub's cache; None if it has none."""
    name = None if os.path.isdir(model_path) else HubName.parse(model_path)
    folder = model_path if name is None else name.snapshot()
    try:
        with open(os.path.join(folder or model_path, "config.json")) as file:
            return _context_in(json.load(file))
    except (OSError, ValueError, RecursionError):
        return None


def _context_in(config: Any) -> int | None:
    """The context of a config, or of the language model in it."""
    if not isinstance(config, dict):
        return None
    length = config.get("max_position_embeddings")
    if isinstance(length, int) and length > 0:
        return length
    for part in _LANGUAGE_MODELS:
        found = _context_in(config.get(part))
        if found is not None:
            return found
    kind = config.get("model_type")
    return _USUAL_CONTEXTS.get(kind) if isinstance(kind, str) else None


def name_of(model_path: str) -> str:
    """The default name for clients: `ORG/NAME` for the Hub, as in `genset run`, else the name of the folder or the GGUF file."""
    hub_name = None if os.path.exists(model_path) else HubName.parse(model_path)
    if hub_name is not None:
        return hub_name.repo
    name = os.path.basename(os.path.realpath(model_path) if os.path.exists(model_path) else model_path.rstrip("/"))
    return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def is_only_a_name(text: str) -> bool:
    """Whether the text is a word that is neither a path here nor a name of the Hub."""
    return "/" not in text and not os.path.exists(text)


def is_gguf(model_path: str) -> bool:
    """Whether it names a GGUF file, local or of the Hub."""
    if os.path.exists(model_path):
        return _is_gguf_file(model_path)
    name = HubName.parse(model_path)
    return name is not None and name.names_gguf


def _is_gguf_file(path: str) -> bool:
    return path.lower().endswith(".gguf") and os.path.isfile(path)


async def locate(model_path: str, *, may_fetch: bool = True) -> str:
    """As `find`, on a thread. If the task that waits is cancelled, the download ends: at its end, a program waits for its threads."""
    downloads: list[Download] = []
    is_over = threading.Event()

    def on_download(download: Download) -> None:
        downloads.append(download)
        if is_over.is_set():
            download.terminate()

    try:
        return await asyncio.to_thread(find, model_path, may_fetch=may_fetch, on_download=on_download)
    except asyncio.CancelledError:
        is_over.set()
        for download in downloads:
            download.terminate()
        raise


def find(model_path: str, *, may_fetch: bool = True, on_download: Callable[[Download], None] = lambda download: None) -> str:
    """Returns the folder with the model's tokenizer and template, or the GGUF file that contains them. With `may_fetch` it downloads what the
    Hub's cache lacks, so an event loop uses `locate`.

    Raises `InvalidArgument`, saying what to do, if there is none.
    """
    if os.path.isdir(model_path):
        return model_path
    if os.path.isfile(model_path):
        if _is_gguf_file(model_path):
            return model_path
        raise InvalidArgument(f"{model_path} is a file; give the folder of a model, or a GGUF file", field="model_path")
    name = HubName.parse(model_path)
    if name is None:
        raise InvalidArgument(f"{model_path} is neither a folder, a GGUF file nor a name like Qwen/Qwen3-0.6B", field="model_path")
    found = name.cached()
    if found is None and not may_fetch:
        raise InvalidArgument(f"{model_path} is not in the cache of the Hub", field="model_path")
    return found or _fetched(model_path, name, on_download)


def _fetched(model_path: str, name: HubName, on_download: Callable[[Download], None]) -> str:
    """Returns what `genset pull` downloads: a folder without weights, or a whole GGUF file, since its tokenizer is inside."""
    # Imported here: the module imports this one.
    from genset.backend.run import find_binary

    try:
        command = [find_binary(), "pull", *([] if name.names_gguf else ["--config-only"]), model_path]
    except SystemExit as absent:
        raise InvalidArgument(
            f"{model_path} is not in the cache of the Hub, and `genset pull`, which would fetch it, cannot be run: {absent}",
            field="model_path",
        ) from None
    problem: list[str] = []
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        on_download(process)
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            # Progress, and at last the error if there is one.
            if problem or line.startswith("error: "):
                problem.append(line)
            else:
                print(line, end="", file=sys.stderr, flush=True)
        path = process.stdout.read().strip()
    if process.returncode != 0 or not path:
        said = "".join(problem).strip().removeprefix("error: ").removeprefix("MODEL: ")
        said = said or f"`genset pull` ended with exit code {process.returncode}"
        raise InvalidArgument(f"{model_path} is no folder or file here, and not to be had from the Hub: {said}", field="model_path")
    return path
