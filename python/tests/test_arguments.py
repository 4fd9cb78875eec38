"""Invalid declarations of a model are refused where they are made."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import types
from pathlib import Path
from typing import Any, cast

import pytest

from genset import EngineConfig, WorkerConfig, WorkerHandle
from genset._frames import pack, unpack
from genset.exceptions import InvalidArgument
from genset.llm import ModelType, register_llm
from genset.runtime import Endpoint, _flag


def refused(declare: Any, **options: Any) -> str:
    with pytest.raises(InvalidArgument) as error:
        declare(**options)
    assert error.value.field in options
    return str(error.value)


def register(model_type: ModelType = ModelType.Backend, **options: Any) -> None:
    # The error is found before the endpoint is used.
    asyncio.run(register_llm(model_type, cast(Any, None), "m", **options))


def test_a_parser_that_no_frontend_has_is_refused_with_those_there_are() -> None:
    assert refused(register, tool_parser="hermess").startswith("tool_parser: 'hermess' is none of apertus, ")
    assert refused(register, reasoning_parser="think").endswith("seed_oss, solar_open2, step3, none")
    assert "'hermess' is none of" in refused(WorkerConfig, tool_call_parser="hermess")
    for known in ("none", "auto", "hermes", "qwen"):
        WorkerConfig(tool_call_parser=known)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"aliases": "qz"}, "aliases: must be a list"),
        ({"aliases": [1]}, "aliases.0: must be a text"),
        ({"media": "image"}, "media: must be a list"),
        ({"media": 5}, "media: must be a list"),
        ({"sampling": ["temprature"]}, "sampling: 'temprature' is none of temperature, "),
        ({"guided": ("xml",)}, "guided: 'xml' is none of json_object, "),
        ({"context_length": "8"}, "context_length: must be a whole number"),
        ({"context_length": 2**70}, "context_length: 1180591620717411303424 is no whole number from 0 to 4294967295"),
        ({"kv_cache_block_size": 0}, "kv_cache_block_size: 0 is no whole number from 1 to"),
        ({"migration_limit": -1}, "migration_limit: -1 is no whole number from 0 to"),
        ({"max_running_requests": 2.0}, "max_running_requests: 2.0 is no whole number from 1 to"),
        ({"resume": "yes"}, "resume: must be true or false"),
        ({"idle_timeout": -1}, "idle_timeout: -1 is no number of seconds from 0 to"),
        ({"idle_timeout": math.nan}, "idle_timeout: nan is no number of seconds"),
        ({"request_timeout": "soon"}, "request_timeout: must be a number"),
        ({"canary_interval": -1}, "canary_interval: -1 is no number of seconds from 0 to"),
        ({"canary_timeout": 0}, "canary_timeout: must be more than 0"),
        ({"user_data": {"at": math.inf}}, "user_data: is not what JSON can hold: "),
        ({"user_data": {"id": 2**70}}, "user_data: is not what JSON can hold: "),
        ({"user_data": [1]}, "user_data: must be a map"),
        ({"custom_template_path": "/no/such/file"}, "custom_template_path: /no/such/file is no file"),
    ],
)
def test_register_llm_refuses_at_the_call(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        register(**options)
    assert str(error.value).startswith(problem)


def test_embeddings_refuse_an_idle_timeout_which_they_do_not_have() -> None:
    told = refused(register, model_type=ModelType.Embedding, idle_timeout=5)
    assert told.startswith("idle_timeout: embeddings have none")
    with pytest.raises(AttributeError):
        # The values pass; the endpoint fails.
        register(ModelType.Embedding, idle_timeout=0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_num_seqs": "64"}, "max_num_seqs: must be a whole number"),
        ({"vocab_size": 0}, "vocab_size: 0 is no whole number from 1 to"),
        ({"inputs": "tokens"}, "inputs: must be a list"),
        ({"inputs": ("token",)}, "inputs: 'token' is none of tokens, text, chat, embed, score"),
        ({"kv_events": 1}, "kv_events: must be true or false"),
        ({"canary": {"stop_conditions": {"max_tokens": 1}}}, "canary: must be a request with one of token_ids, "),
        ({"served_model_name": 7}, "served_model_name: must be a text"),
    ],
)
def test_an_engine_that_declares_what_is_no_value_is_told_the_field(options: dict[str, Any], problem: str) -> None:
    config = EngineConfig(**{"model": "m", "context_length": 8, **options})
    with pytest.raises(InvalidArgument) as error:
        config.to_wire()
    assert str(error.value).startswith(problem)


def test_what_is_not_given_to_a_worker_s_config_is_its_default() -> None:
    config = WorkerConfig.from_runtime_config(WorkerConfig(role="decode"), namespace=None, model_name=None)
    assert (config.namespace, config.component, config.model_name) == ("genset", "decode", "")


def test_an_option_that_was_not_given_is_none_of_what_is_refused() -> None:
    config = WorkerConfig(namespace=cast(Any, None), use_kv_events=cast(Any, None), engine_restarts=cast(Any, None), endpoint_types="")
    assert (config.namespace, config.use_kv_events, config.engine_restarts) == ("genset", False, 0)
    with pytest.raises(AttributeError):
        # The values pass; the endpoint fails.
        register(kv_cache_block_size=None)


def test_the_fields_that_a_subclass_adds_are_its_own() -> None:
    @dataclasses.dataclass
    class Mine(EngineConfig):
        offset: int = 0

    assert Mine(model="m", context_length=8, offset=-1).to_wire()["model"] == "m"


def test_options_of_the_network_are_written_as_flags() -> None:
    assert _flag("wire_port", 7480) == "--wire-port=7480"
    assert _flag("discovery_shared", True) == "--discovery-shared=true"
    assert _flag("etcd_endpoints", ["http://a:2379", "http://b:2379"]) == "--etcd-endpoints=http://a:2379,http://b:2379"


def test_paths_may_be_of_pathlib(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "template").touch()
    paths: dict[str, Any] = {"model_path": tmp_path / "model", "custom_jinja_template": tmp_path / "template"}
    config = WorkerConfig(**paths)
    assert (config.model_path, config.custom_jinja_template) == (str(tmp_path / "model"), str(tmp_path / "template"))
    models: dict[str, Any] = {}
    runtime = types.SimpleNamespace(_services=[], _models=models, _has_engine=False, worker_id=7)
    endpoint = types.SimpleNamespace(name="a.b.c", path=("a", "b", "c"), runtime=runtime)
    path, template = paths["model_path"], paths["custom_jinja_template"]
    asyncio.run(register_llm(ModelType.Backend, cast(Any, endpoint), path, custom_template_path=template))
    spec = unpack(pack(models["a.b.c"]._spec))
    assert (spec["model_path"], spec["chat_template"], spec["engine"]["model"]) == (str(path), str(template), "model")


def test_a_config_of_a_worker_is_refused_where_it_is_made() -> None:
    assert refused(WorkerConfig, migration_limit="3") == "migration_limit: must be a whole number"
    assert refused(WorkerConfig, context_length=0) == "context_length: 0 is no whole number from 1 to 4294967295"
    assert refused(WorkerConfig, endpoint_types="chat,complete").startswith("endpoint_types: 'complete' is none of chat, ")
    assert refused(WorkerConfig, extra_args="--verbose") == "extra_args: must be a list"
    assert refused(WorkerConfig, canary_timeout=0).startswith("canary_timeout: must be more than 0")
    assert refused(WorkerConfig, engine_restarts=-1).startswith("engine_restarts: -1 is no whole number")
    assert refused(WorkerConfig, user_data={"at": math.nan}).startswith("user_data: is not what JSON can hold")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_requests": 0}, "max_requests: 0 is no whole number from 1 to"),
        ({"grace": -1}, "grace: -1 is no number of seconds from 0"),
        ({"grace": math.nan}, "grace: nan is no number of seconds from 0"),
        ({"grace": "soon"}, "grace: must be a number"),
    ],
)
def test_an_endpoint_s_limits_are_checked_before_it_is_served(options: dict[str, Any], problem: str) -> None:
    endpoint = Endpoint(cast(Any, None), ("a", "b", "c"))
    with pytest.raises(InvalidArgument, match=problem):
        asyncio.run(endpoint.serve_endpoint(lambda request: request, **options))


def test_a_count_that_a_load_does_not_have_is_refused() -> None:
    published: list[Any] = []
    worker = WorkerHandle(published.append)
    worker.publish_load({"running_requests": 3})
    with pytest.raises(InvalidArgument, match="kv_active_blocks: is none of the counts of a load: running_requests, "):
        worker.publish_load(cast(Any, {"kv_active_blocks": 3}))
    assert published == [{"load": {"running_requests": 3}}]
