"""Embeddings through the official client, from a Python engine that embeds, and from checkouts."""

import json
import math
import typing
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types.embedding_create_params import EmbeddingCreateParams

from genset_server import GensetServer, embedding_server

MODEL = "counting"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    with embedding_server(MODEL, tmp_path_factory.mktemp("model")) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
            yield client
        assert server.stop() == 0, server.output


def test_floats_and_base64_are_the_same_numbers(embedder):
    # Without a format the client requests base64 and decodes it.
    coded = embedder.embeddings.create(model=MODEL, input="Hello there")
    plain = embedder.embeddings.create(model=MODEL, input="Hello there", encoding_format="float")
    assert coded.data[0].embedding == plain.data[0].embedding
    assert sum(plain.data[0].embedding) == plain.usage.prompt_tokens == plain.usage.total_tokens > 0


def test_a_batch_is_its_parts_in_their_order(embedder):
    texts = ["Hello", "there", "Hello there"]
    batch = embedder.embeddings.create(model=MODEL, input=texts)
    assert [part.index for part in batch.data] == [0, 1, 2]
    alone = [embedder.embeddings.create(model=MODEL, input=text).data[0].embedding for text in texts]
    assert [part.embedding for part in batch.data] == alone


def test_token_ids_are_taken_as_they_are(embedder):
    answer = embedder.embeddings.create(model=MODEL, input=[[1, 9, 2], [3]])
    assert [part.embedding[:4] for part in answer.data] == [[0, 2, 1, 0], [0, 0, 0, 1]]


def test_an_embedding_that_is_cut_has_length_1(embedder):
    [part] = embedder.embeddings.create(model=MODEL, input=[[1, 9, 2]], dimensions=3).data
    assert part.embedding == pytest.approx([0, 2 / math.sqrt(5), 1 / math.sqrt(5)])


def test_every_field_of_the_client_is_tried(embedder):
    fields = {"model": MODEL, "input": "Hi", "dimensions": 2, "encoding_format": "float", "user": "a"}
    assert fields.keys() == typing.get_type_hints(EmbeddingCreateParams).keys()
    assert len(embedder.embeddings.create(**fields).data[0].embedding) == 2


def test_what_cannot_be_embedded_is_refused_by_name(embedder, client):
    with pytest.raises(openai.BadRequestError) as caught:
        embedder.embeddings.create(model=MODEL, input=["Hi", ""])
    assert caught.value.param == "input[1]"
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny-chat", input="Hi")
    assert caught.value.param == "model"


CHECKOUTS = Path(__file__).parent.parent / "engines" / "candle" / "tests" / "encoders"
FAMILIES = ["bert", "bert-dense", "xlm-roberta", "modernbert", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkout_gives_the_embeddings_of_its_reference(family):
    texts = json.loads((CHECKOUTS / family / "expected.json").read_text())["texts"]
    with GensetServer(str(CHECKOUTS / family), "--quantize", "none", out="candle") as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
            answer = client.embeddings.create(model=family, input=[text["text"] for text in texts])
            for part, text in zip(answer.data, texts, strict=True):
                largest = max(map(abs, text["embedding"]))
                assert part.embedding == pytest.approx(text["embedding"], abs=1e-4 * largest)
            assert answer.usage.total_tokens == sum(len(text["tokens"]) for text in texts)
            alone = client.embeddings.create(model=family, input=texts[1]["text"])
            assert alone.data[0].embedding == answer.data[1].embedding
            with pytest.raises(openai.BadRequestError) as caught:
                client.embeddings.create(model=family, input=["a", [7] * 159])
            assert (caught.value.param, caught.value.code) == ("input[1]", "context_length_exceeded")
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=family, messages=[{"role": "user", "content": "Hi"}])
            assert caught.value.param == "model"
        assert server.stop() == 0, server.output
