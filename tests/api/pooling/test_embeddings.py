"""/v1/embeddings, /pooling and /classify."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from quire.engine.client.pooling_params import PoolingParams
from tests.support.fake_core import FakeCore
from tests.support.pooling import LABELS, SIZE, TOKEN_SIZE
from tests.support.pooling_server import added, pooling_server, texts, vectors
from tests.support.tokenizer import byte_tokenizer

PATH = "/v1/embeddings"
PROMPTS = {"prompts": {"query": "Instruct: find\nQuery: ", "document": "d: "}, "default_prompt_name": "document"}


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


async def test_all_kinds_of_input_give_the_same_embeddings(tmp_path: Path) -> None:
    async with pooling_server(tmp_path) as server:
        both = (await server.post(PATH, {"input": ["hello", "world"]})).json()
        assert both["object"] == "list"
        assert both["model"] == "fake"
        assert [(entry["object"], entry["index"]) for entry in both["data"]] == [("embedding", 0), ("embedding", 1)]
        assert both["usage"]["prompt_tokens"] == both["usage"]["total_tokens"] == 10
        assert both["usage"]["completion_tokens"] == 0
        assert np.allclose(np.linalg.norm(vectors(both), axis=1), 1)
        for inputs in (["hello"], "hello", ids("hello"), [ids("hello")]):
            answer = (await server.post(PATH, {"input": inputs})).json()
            assert np.array_equal(vectors(answer)[0], vectors(both)[0])


async def test_null_is_the_default(tmp_path: Path) -> None:
    nulls = dict.fromkeys(
        ("encoding_format", "embed_dtype", "endianness", "dimensions", "priority", "user", "truncation_side")
    )
    of_rerank = dict.fromkeys(("max_tokens_per_doc", "max_tokens_per_query", "top_n", "return_documents"))
    of_cohere = dict.fromkeys(("inputs", "truncate", "max_tokens", "output_dimension", "embedding_types"))
    async with pooling_server(tmp_path) as server:
        plain = (await server.post(PATH, {"input": "a"})).json()["data"]
        assert (await server.post(PATH, {"input": "a", **nulls})).json()["data"] == plain
        rerank = {"query": "a", "documents": ["b"]}
        assert (await server.post("/v2/rerank", {**rerank, **of_rerank})).status_code == 200
        assert (await server.post("/v2/embed", {"texts": ["a"], **of_cohere})).status_code == 200


async def test_openais_client_reads_them(tmp_path: Path) -> None:
    async with (
        pooling_server(tmp_path) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        plain = await client.embeddings.create(model="fake", input=["a", "b"], encoding_format="float")
        default = await client.embeddings.create(model="fake", input=["a", "b"])  # base64, decoded by the client
        shorter = await client.embeddings.create(model="fake", input="a", dimensions=5)
        with pytest.raises(openai.BadRequestError, match="empty"):
            await client.embeddings.create(model="fake", input=["a", ""])
    assert np.allclose([entry.embedding for entry in plain.data], [entry.embedding for entry in default.data])
    assert len(shorter.data[0].embedding) == 5


async def test_a_conversation_is_rendered_and_embedded(tmp_path: Path) -> None:
    core = FakeCore()
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with pooling_server(tmp_path, core=core) as server:
        answer = (await server.post(PATH, chat)).json()
        with_prompt = await server.post(PATH, {**chat, "add_generation_prompt": True})
        with_template = await server.post(PATH, {**chat, "chat_template": "{{ 1 }}"})
    assert len(answer["data"]) == 1
    assert texts(core)[0] == "<|im_start|>user\nhi<|im_end|>\n"
    assert texts(core)[1].endswith("assistant\n")
    assert with_prompt.status_code == 200
    assert with_template.json()["error"]["param"] == "chat_template"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "ubinary"])
async def test_formats_carry_the_same_values(tmp_path: Path, dtype: str) -> None:
    body = {"input": ["hello", "world"], "embed_dtype": dtype, "endianness": "little"}
    async with pooling_server(tmp_path) as server:
        listed = vectors((await server.post(PATH, body)).json())
        encoded = (await server.post(PATH, {**body, "encoding_format": "base64"})).json()
        described = await server.post(PATH, {**body, "encoding_format": "bytes"})
        bare = await server.post(PATH, {**body, "encoding_format": "bytes_only"})
        exact = vectors((await server.post(PATH, {"input": ["hello", "world"]})).json())
    pieces = [base64.b64decode(entry["embedding"]) for entry in encoded["data"]]
    assert described.content == bare.content == b"".join(pieces)
    assert described.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(described.headers["metadata"])
    assert metadata["usage"] == encoded["usage"]
    assert [described.content[entry["start"] : entry["end"]] for entry in metadata["data"]] == pieces
    assert metadata["data"][1]["shape"] == [listed.shape[1]]
    assert "metadata" not in bare.headers
    if dtype in ("float32", "float16"):
        values = [np.frombuffer(piece, f"<{'f4' if dtype == 'float32' else 'f2'}") for piece in pieces]
        assert np.array_equal(values, listed)
    if dtype not in ("int8", "ubinary"):
        assert np.allclose(listed, exact, rtol=0.13)


async def test_embeddings_are_shortened_and_normalized_as_asked(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, facts={"dimensions": (8, 16)}) as server:
        for fields in ({"dimensions": 8}, {"use_activation": False}, {"dimensions": SIZE}):
            answer = await server.post(PATH, {"input": "hello", **fields})
            assert answer.status_code == 200, answer.text
        assert vectors((await server.post(PATH, {"input": "x", "dimensions": 8})).json()).shape == (1, 8)
        refused = await server.post(PATH, {"input": "x", "dimensions": 9})
    assert [message.params for message in added(core)][:2] == [
        PoolingParams(task="embed", dimensions=8),
        PoolingParams(task="embed", use_activation=False),
    ]
    assert "one of 8, 16" in refused.json()["error"]["message"]
    async with pooling_server(tmp_path, facts={"matryoshka": False}) as server:
        refused = await server.post(PATH, {"input": "x", "dimensions": 8})
        assert refused.json()["error"]["param"] == "dimensions"
        assert f"cannot be shortened from {SIZE} values" in refused.json()["error"]["message"]


async def test_the_models_prompts_are_put_before_texts(tmp_path: Path) -> None:
    core = FakeCore()
    files = {"config_sentence_transformers.json": PROMPTS, "sentence_bert_config.json": {"do_lower_case": True}}
    async with pooling_server(tmp_path, core=core, files=files) as server:
        for fields in (
            {},
            {"prompt_name": "query"},
            {"input_type": "query"},
            {"input_type": "search_query"},
            {"input_type": "passage"},
            {"input_type": "clustering"},
            {"instruction": "Look"},
        ):
            assert (await server.post(PATH, {"input": ["Hi"], **fields})).status_code == 200
        wrong = await server.post(PATH, {"input": "Hi", "prompt_name": "other"})
        no_place = await server.post(PATH, {"input": "Hi", "prompt_name": "document", "instruction": "Look"})
        tokens = await server.post(PATH, {"input": [1, 2], "prompt_name": "query"})
        plain_tokens = await server.post(PATH, {"input": [1, 2]})
    query, document = "instruct: find\nquery: hi", "d: hi"
    assert texts(core)[:7] == [document, query, query, query, document, document, "instruct: look\nquery: hi"]
    assert "'query', 'document'" in wrong.json()["error"]["message"]
    assert no_place.json()["error"]["param"] == "instruction"
    assert tokens.json()["error"]["param"] == "prompt_name"
    assert plain_tokens.status_code == 200


async def test_tokens_of_a_prompt_may_be_left_out_of_the_mean(tmp_path: Path) -> None:
    core = FakeCore()
    files = {"config_sentence_transformers.json": PROMPTS, "1_Pooling/config.json": {"include_prompt": False}}
    async with pooling_server(tmp_path, core=core, files=files, joins=True) as server:
        await server.post(PATH, {"input": ["Hi", "Ho"]})
        await server.post(PATH, {"input": "Hi", "prompt_name": "query"})
    assert [message.params.skip_tokens for message in added(core)] == [4, 4, 23]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 5}, "<|im_start|>abc<|im_end|>"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, "<|im_start|>fgh<|im_end|>"),
        ({"truncate_prompt_tokens": 5, "add_special_tokens": False}, "abcde"),
        ({"truncate_prompt_tokens": 1}, "<|im_start|>"),
        ({"truncate_prompt_tokens": -1}, "<|im_start|>abcdefgh<|im_end|>"),
    ],
)
async def test_long_texts_are_cut_inside_their_special_tokens(
    tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, joins=True) as server:
        answer = await server.post(PATH, {"input": "abcdefgh", **fields})
        assert answer.status_code == 200, answer.text
    assert texts(core) == [expected]


async def test_long_token_lists_are_cut(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core) as server:
        for side in ("left", "right"):
            body = {"input": [[1, 2, 3], [4]], "truncate_prompt_tokens": 2, "truncation_side": side}
            assert (await server.post(PATH, body)).status_code == 200
    assert [message.prompt.tolist() for message in added(core)] == [[2, 3], [4], [1, 2], [4]]


@pytest.mark.parametrize(
    ("body", "param", "complaint"),
    [
        ({}, "input", "Field required"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": ["a", ""]}, "input[1]", "no tokens"),
        ({"input": ["a", 5]}, "input[1]", "string"),
        ({"input": ["a", None]}, "input[1]", "string"),
        ({"input": [[1], []]}, "input[1]", "not empty"),
        ({"input": [[1], [2, -1]]}, "input[1]", "token ids"),
        ({"input": [[1], "a"]}, "input[1]", "list of token ids"),
        ({"input": [[1], [2, 5000]]}, "input[1]", "vocabulary of 261"),
        ({"input": ["a", "b" * 600]}, "input[1]", "maximum context length is 512 tokens"),
        ({"input": "b" * 600}, "input", "maximum context length is 512 tokens"),
        ({"input": [[1], [1] * 600]}, "input[1]", "maximum context length is 512 tokens"),
        ({"input": ["a", "b" * 2_000_000]}, "input[1]", "characters"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 inputs"),
        ({"input": ["a"] * 20_000}, "input", "at most 16384"),
        ({"input": {"a": 1}}, "input", "string"),
        ({"input": "a", "encoding_format": "base32"}, "encoding_format", "base64"),
        ({"input": "a", "embed_dtype": "int4"}, "embed_dtype", "int8"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "at most the context length"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1 to 32"),
        ({"input": "a", "dimensions": 33}, "dimensions", "from 1 to 32"),
        ({"input": "a", "priority": 1}, "priority", "--scheduling-policy"),
        ({"input": ["a"] * 300, "encoding_format": "bytes"}, "encoding_format", "at most 256"),
        ({"input": "a", "prompt_name": "x", "input_type": "y"}, "input_type", "cannot be combined"),
        ({"input": "a", "instruction": "b" * 8193}, "instruction", "at most 8192 characters"),
        ({"messages": []}, "messages", "at least 1"),
        (
            {"messages": [{"role": "user"}], "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
            "both",
        ),
        ({"messages": [{"role": "user", "content": "b" * 600}]}, "messages", "maximum context length"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, body: dict[str, Any], param: str, complaint: str) -> None:
    async with pooling_server(tmp_path) as server:
        answer = await server.post(PATH, body)
        assert server.state.models[0].client.slots_in_use == 0
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert complaint in error["message"]


async def test_the_size_of_all_results_is_bounded(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, facts={"embedding_size": 1 << 15, "token_embedding_size": 1 << 15}) as server:
        for path, body in (
            (PATH, {"input": ["a"] * 513}),
            ("/pooling", {"input": ["a" * 300, "b" * 300], "task": "token_embed"}),
            ("/embed_all", {"inputs": ["a" * 300, "b" * 300]}),
        ):
            answer = await server.post(path, body)
            assert answer.status_code == 400
            assert "at most 16777216 values" in answer.json()["error"]["message"]
        assert (await server.post(PATH, {"input": ["a"] * 513, "dimensions": 8})).status_code == 200
        assert server.state.models[0].client.slots_in_use == 0


async def test_what_the_engine_refuses_is_named_by_its_index(tmp_path: Path) -> None:
    core = FakeCore(refuses=lambda message: len(message.prompt) == 3)
    async with pooling_server(tmp_path, core=core) as server:
        answer = await server.post(PATH, {"input": ["a", "bb", "ccc", "d"]})
        alone = await server.post(PATH, {"input": "ccc"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[2]")
    assert alone.json()["error"]["param"] == "input"


async def test_an_empty_text_is_embedded_if_it_has_special_tokens(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, joins=True) as server:
        answer = await server.post(PATH, {"input": ["", "a"]})
    assert answer.json()["usage"]["prompt_tokens"] == 5


async def test_pooling_has_all_tasks(tmp_path: Path) -> None:
    async with pooling_server(tmp_path) as server:

        async def data(**fields: Any) -> Any:
            answer = await server.post("/pooling", {"input": "abc", **fields})
            assert answer.status_code == 200, answer.text
            (entry,) = answer.json()["data"]
            assert entry["object"] == "pooling"
            return entry["data"]

        assert np.shape(await data()) == (SIZE,)  # the first task
        assert np.shape(await data(task="embed", dimensions=3)) == (3,)
        assert np.shape(await data(task="token_embed")) == (3, TOKEN_SIZE)
        assert np.shape(await data(task="classify")) == (len(LABELS),)
        assert np.shape(await data(task="token_classify")) == (3, len(LABELS))
        assert np.shape(await data(task="score")) == (1,)
        encoded = await data(task="token_embed", encoding_format="base64")
        assert len(base64.b64decode(encoded)) == 3 * TOKEN_SIZE * 4
        chat = await server.post("/pooling", {"messages": [{"role": "user", "content": "x"}], "task": "token_embed"})
        assert np.shape(chat.json()["data"][0]["data"]) == (chat.json()["usage"]["prompt_tokens"], TOKEN_SIZE)
        for body, param in (
            ({"task": "plugin"}, "task"),
            ({"task": "generate"}, "task"),
            ({"task": "classify", "dimensions": 4}, "dimensions"),
            ({"task": "classify", "prompt_name": "query"}, "prompt_name"),
        ):
            refused = await server.post("/pooling", {"input": "abc", **body})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_classes_have_labels_and_probabilities(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, "classify") as server:
        answer = (await server.post("/classify", {"input": ["abc", "abd"]})).json()
        for index, entry in enumerate(answer["data"]):
            assert (entry["index"], entry["num_classes"]) == (index, 3)
            assert sum(entry["probs"]) == pytest.approx(1)
            assert entry["label"] == LABELS[int(np.argmax(entry["probs"]))]
        assert answer["usage"]["total_tokens"] == 6
        raw = (await server.post("/classify", {"input": "abc", "use_activation": False})).json()
        assert max(raw["data"][0]["probs"]) > 1
        assert (await server.post("/classify", {"input": ""})).status_code == 400
    async with pooling_server(tmp_path, "classify", facts={"labels": ()}) as server:
        assert (await server.post("/classify", {"input": "abc"})).json()["data"][0]["label"] is None


async def test_unknown_fields_are_named_and_unsupported_ones_refused(tmp_path: Path) -> None:
    async with pooling_server(tmp_path) as server:
        answer = await server.post(PATH, {"input": "a", "heat": 1, "user": "me"})
        assert answer.headers["x-quire-ignored-fields"] == "heat"
        refused = await server.post(PATH, {"input": "a", "mm_processor_kwargs": {"a": 1}})
        assert refused.json()["error"]["param"] == "mm_processor_kwargs"


async def test_metrics_count_these_requests(tmp_path: Path) -> None:
    async with pooling_server(tmp_path) as server:
        await server.post(PATH, {"input": ["hello", "world"]})
        page = (await server.http.get("/metrics")).text
    assert 'http_requests_total{handler="/v1/embeddings",method="POST",status="2xx"} 1.0' in page
    assert 'quire:prompt_tokens_total{engine="0",model_name="fake"} 10.0' in page
    assert 'quire:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 2.0' in page


async def test_the_openapi_document_describes_them(tmp_path: Path) -> None:
    async with pooling_server(tmp_path) as server:
        document = (await server.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            local = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return local + [reference for value in node.values() for reference in references(value)]
        return [reference for value in node for reference in references(value)] if isinstance(node, list) else []

    assert {reference.removeprefix("#/components/schemas/") for reference in references(document)} <= set(schemas)
    content = document["paths"][PATH]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "application/octet-stream"}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = ("EmbeddingTextRequest", "ScoreRequest", "RerankRequest", "TeiPredictRequest", "CohereEmbedRequest")
    for name, body in zip(names, _valid_bodies(), strict=True):
        jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schemas}).validate(body)


def _valid_bodies() -> list[dict[str, Any]]:
    return [
        {"input": [[1, 2], [3]], "truncation_side": "left"},
        {"text_1": "a", "text_2": ["b", {"text": "c"}, {"content": [{"type": "text", "text": "d"}]}]},
        {"query": {"text": "a"}, "documents": ["b"], "top_n": None},
        {"inputs": [["a", "b"], ["c", "d"]]},
        {"inputs": [{"content": [{"type": "text", "text": "d"}]}]},
    ]


async def test_salt_priority_and_flow_reach_the_engine(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, scheduling_policy="priority") as server:
        answer = await server.post(PATH, {"input": ["a", "b"], "priority": 3, "cache_salt": "s", "request_id": "r"})
        await server.post(PATH, {"input": "c"})
    first, second, third = added(core)
    assert {(request.priority, request.cache_salt) for request in (first, second)} == {(3, "s")}
    assert first.flow == second.flow != third.flow
    assert answer.json()["id"] == "embd-r"
