"""Fills in what an engine's config leaves open."""

from __future__ import annotations

import dataclasses
import logging

from genset import _model_files
from genset.engine import USUAL_SAMPLING, EngineConfig

logger = logging.getLogger(__name__)


def completed(config: EngineConfig, model_path: str, migration_limit: int | None = None) -> EngineConfig:
    """Returns the config with the context length of the model's files and the usual sampling options, each if the engine leaves it None.
    Warns if the files have no length, of the assumed options, and of a `migration_limit` without effect on answers that have begun."""
    if config.context_length is None and _model_files.is_gguf(model_path):
        # The native module reads the file, and logs if it has no length.
        config = dataclasses.replace(config, context_length=0)
    elif config.context_length is None:
        length = _model_files.context_length(model_path or config.model)
        if length is None:
            logger.warning("neither the engine nor the model's files give a context_length; requests of any length are let through")
        config = dataclasses.replace(config, context_length=length or _model_files.UNBOUNDED_TOKENS)
    if config.sampling is None:
        if set(config.inputs) - {"embed", "score"}:
            warn_of_sampling("EngineConfig", config.model)
        config = dataclasses.replace(config, sampling=USUAL_SAMPLING)
    if migration_limit and not (config.resume or config.resume_as_prompt) and set(config.inputs) - {"embed", "score"}:
        logger.warning(
            "%s: migration_limit is %d, but an answer that has begun is lost with its worker: EngineConfig declares neither resume "
            "nor resume_as_prompt",
            config.model,
            migration_limit,
        )
    return config


def needs_files(config: EngineConfig) -> bool:
    """Whether a frontend needs the model's tokenizer to serve it."""
    return bool({"tokens", "embed", "score"} & set(config.inputs))


def warn_of_sampling(where: str, model: str) -> None:
    """Warns that options reach a model that may ignore them, and says what to declare."""
    logger.warning(
        "%s: nothing says which sampling options it honours, so these reach it: %s. "
        "Name those it honours in %s(sampling=...), and requests with another are refused",
        model,
        ", ".join(USUAL_SAMPLING),
        where,
    )
