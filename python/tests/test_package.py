"""The parts of the package that need no worker."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import os
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgpack
import pytest

from genset import CompletionUsage, EngineConfig, GenerateRequest, WorkerConfig, exceptions, frontend, sample_main
from genset._convert import Answer, request_from_wire, request_to_wire
from genset._declared import completed
from genset._model_files import UNBOUNDED_TOKENS, HubName, context_length, find, is_gguf, locate, name_of
from genset._frames import Decoder, Kind, ProtocolError, encode, encode_batch, pack, unpack_request
from genset.engine import USUAL_SAMPLING
from genset.backend import BINARY_VARIABLE, engine_command, find_binary, worker_command
from genset.backend.run import is_name_only


def test_any_chunking_gives_the_same_frames() -> None:
    frames = [(Kind.ITEM, 7, b"abc"), (Kind.END, 70_000, b""), (Kind.PING, 0, b"x" * 1000)]
    data = b"".join(encode(*frame) for frame in frames)
    for size in (1, 2, 7, len(data)):
        decoder = Decoder()
        decoded = [frame for at in range(0, len(data), size) for frame in decoder.feed(data[at : at + size])]
        assert decoded == frames


def test_bad_lengths_are_refused() -> None:
    for data in (b"\0\0\0\1" + b"\0" * 6, b"\xff\xff\xff\xff" + b"\0" * 6):
        with pytest.raises(ProtocolError):
            Decoder().feed(data)


def test_a_batch_is_a_list_of_pairs() -> None:
    pairs = [b"\x92" + pack(stream) + pack("item") for stream in range(20)]
    ((kind, stream, payload),) = Decoder().feed(encode_batch(pairs))
    assert (kind, stream) == (Kind.ITEM, 0)
    assert msgpack.unpackb(payload) == [[stream, "item"] for stream in range(20)]


def test_a_request_is_two_values() -> None:
    assert unpack_request(pack({"endpoint": "e"}) + pack([1])) == ({"endpoint": "e"}, [1])
    with pytest.raises(ProtocolError):
        unpack_request(pack({}))


def answer(request: GenerateRequest, *chunks: Any) -> list[Any]:
    made = Answer(request)
    return [msgpack.unpackb(item) for chunk in chunks for item in made.items(chunk)]


def test_pairs_to_score_are_counted_and_their_scores_pass() -> None:
    wire: dict[str, Any] = {"model": "m", "input": {"score": [{"token_ids": [1, 2, 3], "first_tokens": 2}, {"token_ids": [4], "first_tokens": 1}]}}
    request = request_from_wire(wire)
    assert request["score"] == wire["input"]["score"]
    assert request_to_wire(request)["input"] == wire["input"]
    scores, finished = answer(request, {"scores": [0.5, -1.0], "finish_reason": "stop"})
    assert scores == {"scores": [0.5, -1.0]}
    assert finished["finished"]["usage"]["prompt_tokens"] == 4


def test_vectors_have_32_bits_and_other_numbers_keep_theirs() -> None:
    made = Answer({"embed": [[1, 2]]})
    assert made.items({"embeddings": [[0.1, 0.2]]}) == [msgpack.packb({"embeddings": [[0.1, 0.2]]}, use_single_float=True)]
    assert made.items({"scores": [0.1]}) == [pack({"scores": [0.1]})]


def test_a_chunk_with_tokens_and_their_text_is_one_item() -> None:
    of_tokens, of_text = Answer({"model": "m", "token_ids": [1]}), Answer({"model": "m", "text": "t"})

    def items(made: Answer, **more: Any) -> list[Any]:
        chunk: Any = {"token_ids": [5, 6], "index": 0, "text": "hi", **more}
        return [msgpack.unpackb(item) for item in made.items(chunk)]

    assert items(of_tokens) == [{"tokens": {"token_ids": [5, 6]}}]
    assert items(of_text) == [{"text": {"text": "hi", "token_count": 2}}]
    (last,) = items(of_tokens, finish_reason="stop")
    assert (last["finished"]["last"], last["finished"]["usage"]["completion_tokens"]) == ({"token_ids": [5, 6]}, 4)
    # The end of a text that a detokenizer held back.
    assert items(of_tokens, token_ids=[]) == []
    text, end = items(of_text, finish_reason="stop")
    assert text == {"text": {"text": "hi", "token_count": 2}}
    assert (end["finished"]["last"], end["finished"]["usage"]["completion_tokens"]) == ({}, 4)


def test_usage_is_counted_where_the_engine_gives_none() -> None:
    request: GenerateRequest = {"token_ids": [1, 2, 3]}
    items = answer(request, {"token_ids": [5, 6]}, {"token_ids": []}, {"token_ids": [7], "finish_reason": "eos"})
    assert items[0] == {"tokens": {"token_ids": [5, 6]}}
    finished = items[1]["finished"]
    assert (finished["reason"], finished["last"]) == ("stop", {"token_ids": [7]})
    assert finished["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": None}


def test_the_engines_own_usage_wins() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17, "cached_tokens": 4}
    (item,) = answer({}, {"finish_reason": "abort", "completion_usage": usage})
    assert item["finished"]["reason"] == "cancelled"
    assert item["finished"]["usage"] == {"prompt_tokens": 9, "completion_tokens": 8, "cached_tokens": 4}


def test_what_the_engine_s_own_usage_leaves_open_is_counted() -> None:
    usage = {"prompt_tokens": None, "completion_tokens": 8, "total_tokens": None}
    items = answer({"token_ids": [1, 2]}, {"token_ids": [5], "finish_reason": "stop", "completion_usage": usage})
    assert items[0]["finished"]["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "cached_tokens": None}


def test_cached_tokens_may_be_told_as_openai_does() -> None:
    usage: CompletionUsage = {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 4}}
    assert answer({}, {"finish_reason": "stop", "completion_usage": usage})[0]["finished"]["usage"]["cached_tokens"] == 4
    without: list[Any] = [None, {}]
    for details in without:
        (item,) = answer({}, {"finish_reason": "stop", "completion_usage": {**usage, "prompt_tokens_details": details}})
        assert item["finished"]["usage"]["cached_tokens"] is None


def test_a_reason_nobody_knows_is_a_stop_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    (item,) = answer({}, {"finish_reason": "because"})
    assert item["finished"]["reason"] == "stop"
    assert "finish_reason 'because' is none of cancelled, content_filter, length, stop" in caplog.text


class Reason(enum.Enum):
    END = "length"


class TextReason(str, enum.Enum):
    END = "length"


def test_reasons_of_well_known_engines_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    expected = {"max_tokens": "length", "Stop_Sequence": "stop", "eos_token": "stop", "abort": "cancelled"}
    for reason, known in expected.items():
        assert answer({}, {"finish_reason": reason})[0]["finished"]["reason"] == known
    assert answer({}, {"finish_reason": {"type": "length", "length": 5}})[0]["finished"]["reason"] == "length"
    for member in (Reason.END, TextReason.END):
        chunk: Any = {"finish_reason": member}
        assert answer({}, chunk)[0]["finished"]["reason"] == "length"
    assert not caplog.records


def test_a_reason_that_tells_of_an_error_is_one() -> None:
    for reason, problem in [
        ("error", "finish_reason 'error'"),
        ("error: no room at 10:30", "^no room at 10:30$"),
        ({"error": "no room"}, "^no room$"),
        ({"error": ""}, "finish_reason 'error'"),
    ]:
        with pytest.raises(exceptions.Internal, match=problem):
            answer({}, {"token_ids": [], "finish_reason": reason})


def test_requests_have_the_keys_of_their_input() -> None:
    request = request_from_wire({"model": "m", "input": {"tokens": [1]}, "guided": "json_object"})
    assert (request["token_ids"], request["guided_decoding"]) == ([1], {"json_object": True})
    chat = request_from_wire({"model": "m", "input": {"chat": {"messages": [{"role": "user"}]}}})
    assert chat["messages"] == [{"role": "user"}]
    assert "token_ids" not in chat


def test_a_request_names_its_rank() -> None:
    wire = {"model": "m", "input": {"tokens": [1]}, "data_parallel_rank": 3}
    assert request_from_wire(wire)["data_parallel_rank"] == 3
    assert request_from_wire({"model": "m", "input": {"text": "t"}})["data_parallel_rank"] is None


def test_an_engine_names_its_own_canary() -> None:
    canary: GenerateRequest = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}, "guided_decoding": {"json_object": True}}
    wire = EngineConfig(model="m", context_length=8, canary=canary).to_wire()["canary"]
    assert wire == {"model": "m", "input": {"tokens": [1]}, "stop": {"max_tokens": 1}, "guided": "json_object"}
    assert request_from_wire(wire)["guided_decoding"] == {"json_object": True}
    chat: GenerateRequest = {"messages": [{"role": "user", "content": "ping"}]}
    wire = EngineConfig(model="m", context_length=8, canary=chat).to_wire()["canary"]
    assert wire["input"] == {"chat": {"messages": [{"role": "user", "content": "ping"}], "tools": []}}
    assert EngineConfig(model="m", context_length=8).to_wire()["canary"] is None


def test_an_engine_declares_where_it_deviates() -> None:
    config = EngineConfig(model="m", context_length=8, deviations=("no_min_tokens",), inputs=("chat",), media=("image",))
    assert config.to_wire()["capabilities"]["deviations"] == ["no_min_tokens"]
    assert config.to_wire()["capabilities"]["media"] == ["image"]
    # No answer can carry them, so no engine can declare them.
    assert "prompt_logprobs" not in config.to_wire()["capabilities"]


def test_every_exception_has_its_own_kind() -> None:
    classes = exceptions.EngineError.__subclasses__()
    assert len({cls.kind for cls in classes}) == len(classes) == 13
    wire = exceptions.Overloaded("later", field="f", retry_after=1.5).to_wire()
    assert wire["details"] == {"field": "f", "retry_after": {"secs": 1, "nanos": 500_000_000}}


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("client", "cancelled"), ("deadline", "deadline_exceeded"), ("shutdown", "engine_shutdown"), ("engine_dead", "disconnected")],
)
def test_a_stop_is_the_same_error_as_in_the_protocol(reason: str, kind: str) -> None:
    assert exceptions.EngineError.of_reason(reason).kind == kind


def test_an_error_names_its_field_once() -> None:
    told = {"no 3": "n: no 3", "n must be 1": "n must be 1", "n[0]: is no text": "n[0]: is no text", "n": "n"}
    assert {message: str(exceptions.InvalidArgument(message, field="n")) for message in told} == told


def test_an_error_made_of_anything_can_be_sent_and_read() -> None:
    class Broken(Exception):
        pass

    def wire(message: Any, **options: Any) -> Any:
        error = exceptions.InvalidArgument(message, **options)
        assert str(error)
        return msgpack.unpackb(pack(error.to_wire()))

    assert [wire(message)["message"] for message in (42, None, Broken("why"))] == ["42", "None", "why"]
    assert wire("cut \ud83d", field="\ud83d")["message"] == "cut \\ud83d"
    assert wire("must be a place", field=3)["details"] == {"field": "3"}
    # One frame has to hold it.
    assert len(wire("x" * 100_000)["message"]) < 10_000
    for after in (-0.2, -(2**70)):
        assert wire("later", retry_after=after)["details"]["retry_after"] == {"secs": 0, "nanos": 0}
    for no_time in (float("inf"), float("nan"), 2**63, 10**400, "soon"):
        assert wire("later", retry_after=no_time)["details"] == {}


def test_run_is_found_where_others_look_for_it() -> None:
    from genset.backend import run
    from genset.backend.run import run as same
    from genset.dynamo.common.backend.run import run as ported

    assert same is run and ported is run


def test_the_sample_takes_the_tokenizer_of_a_name_that_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, "/bin/sh")

    def model_path(*arguments: str) -> str | None:
        words = sample_main.command(list(arguments))
        return words[words.index("--model-path") + 1] if "--model-path" in words else None

    assert model_path("--model-name", "sample") is None
    for name in ("Qwen/Qwen3-0.6B", str(tmp_path)):
        assert model_path("--model-name", name) == name
    assert model_path("--model-name", "Qwen/Qwen3-0.6B", "--model-path", "other") == "other"


def test_the_context_of_a_model_is_in_its_files(tmp_path: Path) -> None:
    assert context_length(str(tmp_path)) is None
    for text, expected in [('{"max_position_embeddings": 2048}', 2048), ("[]", None), ("{", None), ("{}", None)]:
        (tmp_path / "config.json").write_text(text)
        assert context_length(str(tmp_path)) == expected


def test_the_context_of_a_model_of_more_than_text_is_its_language_model_s(tmp_path: Path) -> None:
    language = {"max_position_embeddings": 2048}
    cases: list[tuple[Any, int | None]] = [
        ({"text_config": language}, 2048),
        ({"llm_config": language, "vision_config": {"max_position_embeddings": 1}}, 2048),
        ({"language_config": language, "max_position_embeddings": 4096}, 4096),
        ({"thinker_config": {"text_config": language}}, 2048),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, 131_072),
        ({"text_config": None, "model_type": []}, None),
    ]
    for config, expected in cases:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert context_length(str(tmp_path)) == expected


def test_the_context_of_a_model_of_the_hub_is_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--Some--Model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc\n")
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text('{"max_position_embeddings": 4096}')
    assert [context_length(name) for name in ("Some/Model", "hf://Some/Model", "Some/Other")] == [4096, 4096, None]


def test_models_of_the_hub_are_named_as_on_the_command_line() -> None:
    for text, expected in [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "main", None, None)),
        ("hf://a/b@v1.0", ("a/b", "v1.0", None, None)),
        ("a/b:Q4_K_M", ("a/b", "main", None, "Q4_K_M")),
        ("hf://a/b@main/UD/c.GGUF", ("a/b", "main", "UD/c.GGUF", None)),
    ]:
        assert HubName.parse(text) == expected
    for text in ("a", "/a/b", "a/b/c", "a/b/../c.gguf", "a/b@", "./a/b.gguf", ""):
        assert HubName.parse(text) is None, text
    names = ["Qwen/Qwen3-0.6B@v1", "hf://a/b-GGUF:Q8_0", "hf://a/b@main/UD/c.GGUF", "./no/folder/"]
    assert [name_of(name) for name in names] == ["Qwen/Qwen3-0.6B", "a/b-GGUF", "a/b", "folder"]
    assert [is_gguf(name) for name in names] == [False, True, True, False]


def test_revisions_and_files_of_the_hub_are_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv(BINARY_VARIABLE, "no such program")
    folder = tmp_path / "models--Some--Model/snapshots/abc"
    (tmp_path / "models--Some--Model/refs").mkdir(parents=True)
    (tmp_path / "models--Some--Model/refs/v1").write_text("abc")
    (folder / "UD").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "UD/m.gguf"):
        (folder / name).write_text("{}")
    for name in ("Some/Model@v1", "hf://Some/Model@abc"):
        assert find(name) == str(folder)
    assert find("hf://Some/Model@v1/UD/m.gguf") == str(folder / "UD/m.gguf")
    for name in ("Some/Model", "Some/Model@v1/other.gguf", "Some/Model@v1:Q8_0"):
        with pytest.raises(exceptions.InvalidArgument, match="`genset pull`, which would fetch it, cannot be run: GENSET_BIN=no such"):
            find(name)
        with pytest.raises(exceptions.InvalidArgument, match="is not in the cache of the Hub$"):
            find(name, may_fetch=False)


def test_what_the_cache_lacks_is_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "genset"
    binary.write_text('#!/bin/sh\necho "$*" >> "$0.asked"\necho "fetching it" >&2\necho /the/snapshot\n')
    binary.chmod(0o755)
    monkeypatch.setenv(BINARY_VARIABLE, str(binary))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("Some/Model@v1", "hf://Some/Model/m.gguf"):
        assert find(name) == "/the/snapshot"
    assert (tmp_path / "genset.asked").read_text() == "pull --config-only Some/Model@v1\npull hf://Some/Model/m.gguf\n"
    assert capfd.readouterr().err == "fetching it\n" * 2
    binary.write_text("#!/bin/sh\necho 'error: MODEL: there is no Some/Model;' >&2\necho 'look elsewhere' >&2\nexit 2\n")
    with pytest.raises(exceptions.InvalidArgument) as refused:
        find("Some/Model")
    assert refused.value.field == "model_path"
    assert str(refused.value).endswith("not to be had from the Hub: there is no Some/Model;\nlook elsewhere")
    assert capfd.readouterr().err == ""
    binary.write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(exceptions.InvalidArgument, match="`genset pull` ended with exit code 7"):
        find("Some/Model")


def test_a_download_ends_with_the_task_that_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, begun = tmp_path / "genset", tmp_path / "genset.begun"
    os.mkfifo(begun)
    steps = ['trap \'echo > "$0.ended"; exit 1\' TERM', 'echo > "$0.begun"', "for _ in $(seq 1000); do sleep 0.05; done"]
    binary.write_text("\n".join(["#!/bin/sh", *steps, ""]))
    binary.chmod(0o755)
    monkeypatch.setenv(BINARY_VARIABLE, str(binary))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))

    async def main() -> None:
        locating = asyncio.ensure_future(locate("Some/Model"))
        await asyncio.to_thread(begun.read_text)
        locating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await locating

    # At its end the loop waits for the thread.
    asyncio.run(main())
    assert (tmp_path / "genset.ended").exists()


def test_what_an_engine_leaves_open_is_filled_in_with_warnings(caplog: pytest.LogCaptureFixture) -> None:
    config = completed(EngineConfig(model="m"), "")
    assert (config.context_length, config.sampling) == (UNBOUNDED_TOKENS, USUAL_SAMPLING)
    assert "m: nothing says which sampling options it honours, so these reach it: temperature, " in caplog.text
    assert "EngineConfig(sampling=...)" in caplog.text
    assert "requests of any length are let through" in caplog.text
    caplog.clear()
    for declared in (("seed",), ()):
        assert completed(EngineConfig(model="m", context_length=8, sampling=declared), "").sampling == declared
    completed(EngineConfig(model="m", context_length=8, inputs=("embed",)), "")
    completed(EngineConfig(model="m", context_length=8, inputs=("score",)), "")
    assert not caplog.records


def test_a_migration_limit_that_moves_no_begun_answer_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def warned(migration_limit: int | None, **declared: Any) -> int:
        caplog.clear()
        completed(EngineConfig(model="m", context_length=8, sampling=(), **declared), "", migration_limit)
        return sum("neither resume nor resume_as_prompt" in record.getMessage() for record in caplog.records)

    assert warned(2) == 1
    # No limit, a limit of 0, and an engine without answers to migrate.
    assert warned(None) == warned(0) == warned(2, inputs=("embed",)) == 0
    assert warned(2, resume=True) == warned(2, resume_as_prompt=True) == 0


def test_an_engine_declares_how_it_goes_on_with_anothers_answer() -> None:
    cases: list[dict[str, Any]] = [{}, {"resume": True}, {"resume_as_prompt": True}]
    for declared in cases:
        can = EngineConfig(model="m", context_length=8, **declared).to_wire()["capabilities"]
        assert {name: can[name] for name in ("resume", "resume_as_prompt") if can[name]} == declared


def test_a_config_without_a_context_length_names_the_field() -> None:
    with pytest.raises(exceptions.InvalidArgument) as refused:
        EngineConfig(model="m").to_wire()
    assert refused.value.field == "context_length"


def test_a_runtime_config_gives_the_fields_it_has() -> None:
    runtime = types.SimpleNamespace(namespace="ns", request_plane="nats", unrelated=1)
    config = WorkerConfig.from_runtime_config(runtime, model_name="m")
    assert (config.namespace, config.request_plane, config.model_name) == ("ns", "nats", "m")


def test_a_chunk_that_cannot_be_sent_is_named() -> None:
    made = Answer({"model": "m", "token_ids": [1]})
    with pytest.raises(TypeError, match="token_ids: 1: a whole number must be from"):
        made.plain({"token_ids": [1, 2**70]})
    with pytest.raises(TypeError, match="a chunk: text.token_count: a whole number must be from"):
        made.items({"text": "a", "token_count": 2**70})


def test_the_worker_is_told_how_to_start_the_program_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "genset"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv(BINARY_VARIABLE, str(binary))
    config = WorkerConfig(
        namespace="ns",
        model_name="m",
        model_path="/models/m",
        request_plane="tcp",
        custom_jinja_template="chat.jinja",
        request_timeout=0,
        canary_timeout=90.5,
        engine_restarts=3,
        context_length=100,
        migration_limit=0,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        user_data={"adapter": "a b"},
        event_plane="nats",
        use_kv_events=True,
    )
    command = worker_command(config, ["python", "my engine.py", "--x"])
    assert command == [
        *[str(binary), "run", "in=dyn://ns.backend.generate", "out=cmd:python 'my engine.py' --x", "/models/m"],
        *["--model-name", "m", "--request-plane", "tcp", "--chat-template", "chat.jinja"],
        *["--request-timeout", "0", "--canary-timeout", "90.5", "--engine-restarts", "3"],
        *["--context-length", "100", "--migration-limit", "0", "--tool-parser", "hermes", "--reasoning-parser", "qwen3"],
        *["--user-data", '{"adapter": "a b"}'],
    ]
    monkeypatch.chdir(tmp_path)
    for name, files in [("m", []), ("genset", ["genset"]), ("org/m", ["org/m"]), ("./m", ["./m"])]:
        command = worker_command(WorkerConfig(model_name=name), ["engine"])
        assert command[4:] == [*files, "--model-name", name]


def test_a_model_that_is_only_a_name_may_have_its_files_named_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("GENSET_MODEL_PATH", "GENSET_CONFIG")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    named = WorkerConfig(model_name="only-a-name")
    assert is_name_only(named)
    for other in (WorkerConfig(), WorkerConfig(model_name="org/m"), dataclasses.replace(named, extra_args=["--model-path=/m"])):
        assert not is_name_only(other), other
    for variable in variables:
        with monkeypatch.context() as given:
            given.setenv(variable, "/m")
            assert not is_name_only(named), variable


def test_the_frontend_s_port_is_a_default() -> None:
    def port(*arguments: str, **given: str) -> str | None:
        return frontend.environment(arguments, given).get("GENSET_HTTP_PORT")

    assert port() == port("--model-name", "m") == "8000"
    assert port(GENSET_HTTP_PORT="9000") == "9000"
    assert port("--config", "f.toml") is port("--config=f.toml") is port(GENSET_CONFIG="f.toml") is None


def test_a_missing_binary_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, "/no/such/genset")
    with pytest.raises(SystemExit, match="GENSET_BIN=/no/such/genset is no program"):
        find_binary()


def test_the_command_of_a_script_is_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["my_engine.py", "--a"])
    monkeypatch.setattr("sys.modules", {"__main__": types.ModuleType("__main__")})
    assert engine_command()[1:] == [str(Path("my_engine.py").resolve()), "--a"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_engine", ["-m", "my_engine"]),
        ("my_engine.__main__", ["-m", "my_engine"]),
        ("__main__", [str(Path("my_engine.pyz").resolve())]),
    ],
)
def test_the_command_of_a_module_is_its_name_and_that_of_an_archive_its_path(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = ModuleSpec(name, None)
    monkeypatch.setattr("sys.argv", ["my_engine.pyz", "--a"])
    monkeypatch.setattr("sys.modules", {"__main__": main})
    assert engine_command()[1:] == [*words, "--a"]
