"""Pictures in the inputs of models that pool, in all forms that vLLM has."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse
from safetensors.numpy import save

from quire.engine.client.pictures import FixedSize, FrameSampling, PictureInfo, VideoInfo
from tests.support.clips import video_file
from tests.support.pdf import pdf
from tests.support.picture_chat import (
    IMAGE,
    PARTS,
    TOKEN,
    VIDEO,
    PictureCore,
    base64_of,
    data_url,
    image_block,
    image_url,
    painted,
    picture_info,
    picture_server,
    picture_tokenizer,
)
from tests.support.pooling import LABELS, pooling_info
from tests.support.pooling_server import vectors
from tests.support.server import Server

RED, BLUE = painted("red"), painted("blue", (8, 16))
PICTURE = f"<pic>{IMAGE * 4}</pic>"  # in the text of a prompt
SIDES = (
    "{% for m in messages %}{% if m.role == 'query' %}Q{% elif m.role == 'document' %}D{% else %}S{% endif %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}|"
    "{% endfor %}"
)
ALONE = PictureInfo(
    placeholder=0,
    placeholder_text="",
    geometry=FixedSize(height=8, width=8, tokens=1),
    item_tokens=1,
    alone=True,
)


class PoolingCore(PictureCore):
    """A core of a model that pools, and reads pictures unless `pictures` is None."""

    def __init__(self, *tasks: str, pictures: PictureInfo | None = None, sees: bool = True, **facts: Any) -> None:
        super().__init__()
        read = (pictures or picture_info()) if sees else None
        self.info = pooling_info(self.info, *tasks, pictures=read, **facts)


@asynccontextmanager
async def serving(folder: Path, core: PoolingCore, template: str = PARTS, **options: Any) -> AsyncIterator[Server]:
    """A server, which must hold no memory for media in the end."""
    async with picture_server(folder, core, template=template, **options) as server:
        yield server
        for _ in range(100):
            core.received.clear()
            gc.collect()  # errors have references to the frames that raised them
            if not server.state.media_memory.held:
                break
            await asyncio.sleep(0.02)
        assert server.state.media_memory.held == 0


def user(*parts: Any) -> dict[str, Any]:
    """A conversation of one message."""
    return {"messages": [{"role": "user", "content": content(*parts)["content"]}]}


def content(*parts: Any) -> dict[str, Any]:
    """A query or a document."""
    return {"content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]}


async def test_conversations_have_pictures(tmp_path: Path) -> None:
    core = PoolingCore()
    async with serving(tmp_path, core) as server:
        body = user("hi", image_url(RED))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.post("/embeddings", body={**body, "model": "fake"}, cast_to=CreateEmbeddingResponse)
        assert core.prompts == [f"<|im_start|>user\nhi{PICTURE}<|im_end|>\n"]
        assert answer.usage.prompt_tokens == len(core.requests[0].prompt)
        assert [(item.start, item.length) for item in core.items[0]] == [(9, 4)]
        assert core.items[0][0].pixels.shape == (1, 8, 8, 3)
        tokens = await server.post("/pooling", {**body, "task": "token_embed"})
        assert len(tokens.json()["data"][0]["data"]) == answer.usage.prompt_tokens
        labels = await server.post("/classify", body)
        assert labels.json()["data"][0]["label"] in LABELS
        assert len({items[0].hash for items in core.items}) == 1
        await server.post("/v1/embeddings", {**body, "add_generation_prompt": True})
        assert core.prompts[-1].endswith("<|im_end|>\n<|im_start|>assistant\n")
        card = (await server.http.get("/v1/models")).json()["data"][0]
        assert card["input_modalities"] == ["text", "image"]


async def test_models_without_eyes_name_the_part(tmp_path: Path) -> None:
    async with serving(tmp_path, PoolingCore(sees=False)) as server:
        card = (await server.http.get("/v1/models")).json()["data"][0]
        assert card["input_modalities"] == ["text"]
        for path, body, param in (
            ("/v1/embeddings", user("hi", image_url(RED)), "messages[0].content[1]"),
            ("/classify", user(image_url(RED)), "messages[0].content[0]"),
            ("/score", {"data_1": content("a", image_url(RED)), "data_2": "b"}, "data_1.content[1]"),
            ("/rerank", {"query": "a", "documents": ["b", content(image_url(RED))]}, "documents[1].content[0]"),
            ("/rerank", {"query": image_url(RED), "documents": ["b"]}, "query"),
        ):
            answer = await server.post(path, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert "accepts text only" in error["message"]
        unused = await server.post("/score", {"text_1": "a", "text_2": "b", "mm_processor_kwargs": {"min_pixels": 1}})
        assert (unused.status_code, unused.json()["error"]["param"]) == (400, "mm_processor_kwargs")


BROKEN = image_url(b"\x89PNG\r\n\x1a\nnothing")


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", user(BROKEN), "messages[0].content[0]", "PNG"),
        ("/v1/embeddings", user(image_url(RED)) | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "media"),
        ("/v1/embeddings", user(image_url(RED), "b" * 5000), "messages", "maximum context length"),
        ("/v1/embeddings", user({"type": "video_url", "video_url": {"url": "x"}}), "messages[0].content[0]", "video"),
        ("/rerank", {"query": "a", "documents": ["b", content("c", BROKEN)]}, "documents[1].content[1]", "PNG"),
        ("/rerank", {"query": "a", "documents": [content({"type": "x"})]}, "documents[0].content[0]", "'x'"),
        ("/rerank", {"query": "a", "documents": [content({})]}, "documents[0].content[0]", "type"),
        ("/rerank", {"query": "a", "documents": [{"content": [1]}]}, "documents[0].content[0]", "object"),
        ("/rerank", {"query": "a", "documents": [{}]}, "documents[0]", "content"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "pictures"),
        (
            "/score",
            {"text_1": "a", "text_2": content(image_url(RED)), "max_tokens_per_doc": 3},
            "max_tokens_per_doc",
            "",
        ),
        ("/score", {"text_1": "a", "text_2": ["b", "c" * 5000]}, "text_2[1]", "maximum context length"),
    ],
)
async def test_errors_name_the_field(tmp_path: Path, path: str, body: Any, param: str, message: str) -> None:
    async with serving(tmp_path, PoolingCore(score_method="cosine")) as server:
        answer = await server.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert message in error["message"]


async def test_embedders_compare_messages(tmp_path: Path) -> None:
    """Texts, too, are messages, so that they are in the same space; the instruction is the system message."""
    core = PoolingCore("embed", score_method="cosine")
    async with serving(tmp_path, core) as server:
        documents = ["x", content("y", image_url(RED)), image_url(BLUE), {"text": "z"}]
        body = {"query": content(image_url(RED)), "documents": documents, "instruction": "find"}
        answer = await server.post("/v1/rerank", body)
        assert answer.status_code == 200, answer.text
        end = "<|im_end|>\n<|im_start|>assistant\n"
        before = "<|im_start|>system\nfind<|im_end|>\n<|im_start|>user\n"
        assert core.prompts == [
            f"{before}{PICTURE}{end}",
            *(f"<|im_start|>user\n{text}{end}" for text in ("x", f"y{PICTURE}", PICTURE, "z")),
        ]
        results = answer.json()["results"]
        assert {result["index"]: result["document"] for result in results} == {
            0: {"text": "x"},
            1: {"text": "y", "media": ["documents[1].content[1]"]},
            2: {"text": None, "media": ["documents[2]"]},
            3: {"text": "z"},
        }
        pair = {"queries": [content(image_url(RED)), "x"], "documents": [content(image_url(RED)), "x"]}
        scores = (await server.post("/score", pair)).json()["data"]
        assert [entry["score"] for entry in scores] == pytest.approx([1, 1], abs=1e-6)


async def test_rerankers_read_pairs(tmp_path: Path) -> None:
    """The pictures of a query stand in the prompt of each document."""
    core = PoolingCore("score")
    async with serving(tmp_path, core, SIDES) as server:
        body = {"query": content("q", image_url(RED)), "documents": ["x", content(image_url(BLUE), "y")]}
        answer = await server.post("/rerank", {**body, "instruction": "find"})
        assert answer.status_code == 200, answer.text
        assert core.prompts == [f"Sfind|Qq{PICTURE}|Dx|", f"Sfind|Qq{PICTURE}|D{PICTURE}y|"]
        first, second = core.items
        assert first[0].hash == second[0].hash != second[1].hash
        assert [item.start for item in second] == [9, 17]
        await server.post("/rerank", {"query": "q", "documents": ["x", image_url(RED)]})
        await server.post("/rerank", {"query": "q", "documents": ["x"]})
        assert core.prompts[2:] == ["Qq|Dx|", f"Qq|D{PICTURE}|", "Qq|Dx|"]
        matched = {"text_1": [image_url(RED), "b"], "text_2": ["c", image_url(BLUE)]}
        assert len((await server.post("/score", matched)).json()["data"]) == 2
        assert core.prompts[5:] == [f"Q{PICTURE}|Dc|", f"Qb|D{PICTURE}|"]


async def test_the_picture_of_a_query_is_prepared_once_for_all_documents(tmp_path: Path) -> None:
    async with serving(tmp_path, PoolingCore("score"), SIDES, mm_processor_cache_gb=0) as server:
        answer = await server.post("/rerank", {"query": image_url(RED), "documents": ["a", "b", image_url(BLUE)]})
        assert answer.status_code == 200, answer.text
        metrics = (await server.http.get("/metrics")).text
        assert re.search(r"mm_cache_queries_total\{.*\} 4", metrics), metrics
        assert re.search(r"mm_cache_hits_total\{.*\} 2", metrics), metrics


@pytest.mark.parametrize("name", ["page.pdf", None])
async def test_a_page_is_a_picture_where_prompts_have_no_other_text(tmp_path: Path, name: str | None) -> None:
    """As those of ColPali: title and text of a file have no effect, of which the title is named."""
    info = msgspec.structs.replace(picture_info(), without_text=True)
    core = PoolingCore("token_embed", pictures=info, score_method="max_sim")
    page = {"filename": name, "file_data": data_url(pdf("Some text"), "application/pdf")}
    async with serving(tmp_path, core, SIDES) as server:
        body = {"query": "q", "documents": [{"type": "file", "file": page}, "y"]}
        answer = await server.post("/rerank", body)
        assert answer.status_code == 200, answer.text
        assert core.prompts == ["Qq|", f"D{PICTURE}|", "Dy|"]
        assert answer.headers.get("x-quire-ignored-fields") == (name and "documents[0].file.filename")


async def test_a_pair_may_have_a_picture_and_embeddings_of_one(tmp_path: Path) -> None:
    core = PoolingCore("score")
    embeddings = {"type": "image_embeds", "image_embeds": base64_of(save({"x": np.ones((4, 6), np.float32)}))}
    async with serving(tmp_path, core, SIDES, enable_mm_embeds=True) as server:
        answer = await server.post("/rerank", {"query": image_url(RED), "documents": [content("a", embeddings)]})
        assert answer.status_code == 200, answer.text
        assert core.prompts == [f"Q{PICTURE}|Da{PICTURE}|"]
        seen, known = core.items[0]
        assert seen.encoding is None
        assert known.encoding is not None


WATCHED = VideoInfo(
    placeholder=TOKEN[VIDEO],
    placeholder_text=VIDEO,
    geometry=FixedSize(height=8, width=8, tokens=2),
    sampling=FrameSampling(rule="uniform", num_frames=2),
    before="<pic>",
    after="</pic>",
)
FRAMES = f"<pic>{VIDEO * 2}</pic>" * 2  # in the text of a prompt


def video_url(content: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(content, "video/mp4")}}


async def test_conversations_queries_and_documents_have_videos(tmp_path: Path) -> None:
    core = PoolingCore("embed", pictures=picture_info(video=WATCHED), score_method="cosine")
    clip = video_url(video_file(8, fps=4))
    async with serving(tmp_path, core) as server:
        card = (await server.http.get("/v1/models")).json()["data"][0]
        assert card["input_modalities"] == ["text", "image", "video"]
        body = user("hi", clip, image_url(RED))
        for fields in ({}, {"media_io_kwargs": {"video": {"num_frames": 1}}}):
            answer = await server.post("/v1/embeddings", {**body, **fields})
            assert answer.status_code == 200, answer.text
        assert f"hi{FRAMES}{PICTURE}" in core.prompts[0]
        assert [len(items) for items in core.items] == [3, 2]
        answer = await server.post("/rerank", {"query": clip, "documents": ["x", content("y", clip), image_url(RED)]})
        assert answer.status_code == 200, answer.text
        assert [prompt.count(FRAMES) for prompt in core.prompts[2:]] == [1, 0, 1, 0]
        answer = await server.post("/score", {"text_1": "a", "text_2": ["b", content("c", video_url(RED))]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "text_2[1].content[1]"


async def test_pairs_of_a_reranker_have_videos(tmp_path: Path) -> None:
    """The video of a query stands in the prompt of each document."""
    template = SIDES.replace("{% else %}{{ c.text }}", "{% elif c.type == 'video' %}<video>{% else %}{{ c.text }}")
    core = PoolingCore("score", pictures=picture_info(video=WATCHED))
    async with serving(tmp_path, core, template) as server:
        body = {"query": content("q", video_url(video_file(8, fps=4))), "documents": ["x", image_url(RED)]}
        answer = await server.post("/rerank", body)
        assert answer.status_code == 200, answer.text
        assert core.prompts == [f"Qq{FRAMES}|Dx|", f"Qq{FRAMES}|D{PICTURE}|"]


class Forgetful(PoolingCore):
    """A core that keeps nothing of what it has got."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.received = _Nothing()


class _Nothing(list[Any]):
    def append(self, _: Any) -> None:
        """Forget it."""


async def test_no_request_waits_for_memory_while_it_holds_some(tmp_path: Path) -> None:
    """There is memory for one pair, and for the queries of all requests, but not for both."""
    core = Forgetful("score", pictures=picture_info(FixedSize(height=256, width=256, tokens=4)))
    async with serving(tmp_path, core, SIDES, max_media_memory="4MiB") as server:
        queries = [painted(color) for color in ("red", "blue", "green", "white", "black", "gray", "pink", "brown")]
        pages = [image_url(RED), image_url(BLUE)]
        answers = await asyncio.gather(
            *(server.post("/rerank", {"query": image_url(query), "documents": pages}) for query in queries)
        )
        assert [answer.status_code for answer in answers] == [200] * len(queries), answers[0].text


async def test_rerankers_need_a_template_of_pairs(tmp_path: Path) -> None:
    async with serving(tmp_path, PoolingCore("score")) as server:
        answer = await server.post("/score", {"text_1": "a", "text_2": image_url(RED)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text_2")
        assert "`query` and `document`" in answer.json()["error"]["message"]


async def test_late_interaction_compares_the_tokens_of_pictures(tmp_path: Path) -> None:
    core = PoolingCore("token_embed", score_method="max_sim")
    async with serving(tmp_path, core, SIDES) as server:
        body = {"query": "q", "documents": [image_url(RED), content("y"), image_url(BLUE)]}
        answer = await server.post("/rerank", body)
        assert answer.status_code == 200, answer.text
        assert core.prompts == ["Qq|", f"D{PICTURE}|", "Dy|", f"D{PICTURE}|"]
        tokens = await server.post("/pooling", user(image_url(RED)))
        assert len(tokens.json()["data"][0]["data"]) == 8


async def test_encoders_of_texts_and_of_pictures(tmp_path: Path) -> None:
    core = PoolingCore("embed", pictures=ALONE, score_method="cosine")
    async with serving(tmp_path, core) as server:
        picture = await server.post("/v1/embeddings", user(image_url(RED)))
        assert picture.status_code == 200, picture.text
        assert (core.requests[0].prompt.tolist(), core.items[0][0].start) == ([0], 0)
        assert picture.json()["usage"]["prompt_tokens"] == 1
        text = await server.post("/v1/embeddings", user("cat"))
        assert np.array_equal(
            vectors(text.json()), vectors((await server.post("/v1/embeddings", {"input": "cat"})).json())
        )
        ranked = await server.post("/rerank", {"query": "cat", "documents": ["cat", image_url(RED)]})
        assert ranked.json()["results"][0]["index"] == 0
        assert core.requests[-1].prompt.tolist() == [0]
        for body, param in (
            (user("a", image_url(RED)), "messages[0]"),
            (user(image_url(RED), image_url(BLUE)), "messages[0]"),
            ({"messages": [*user("a")["messages"], *user("b")["messages"]]}, "messages"),
        ):
            answer = await server.post("/v1/embeddings", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        wrong = await server.post("/score", {"text_1": "a", "text_2": content("b", image_url(RED))})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_2")


async def test_fields_without_effect_on_encoders_of_texts_and_of_pictures(tmp_path: Path) -> None:
    """No template renders the message, and of a file only the picture is read."""
    core = PoolingCore("embed", pictures=ALONE)
    titles = {
        "file.filename": {"type": "file", "file": {"filename": "a.png", "file_data": base64_of(RED)}},
        "filename": {"type": "input_file", "filename": "a.png", "file_data": base64_of(RED)},
        "title": {**image_block(RED), "type": "document", "title": "A"},
    }
    template = {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": True}
    async with serving(tmp_path, core) as server:
        for field, part in titles.items():
            answer = await server.post("/v1/embeddings", user(part))
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-quire-ignored-fields"] == f"messages[0].content[0].{field}"
        for part in ("cat", image_url(RED)):
            answer = await server.post("/v1/embeddings", user(part) | template)
            ignored = {name.strip() for name in answer.headers["x-quire-ignored-fields"].split(",")}
            assert ignored == {"add_generation_prompt", "chat_template_kwargs"}
            refused = await server.post("/v1/embeddings", user(part) | {"chat_template": "x"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")


async def test_texts_of_some_models_are_padded(tmp_path: Path) -> None:
    """SigLIP was trained with padding, which takes part in the attention."""
    core = PoolingCore("embed", pictures=ALONE, padded_to=7)
    async with serving(tmp_path, core) as server:
        server.state.models[0].renderer.tokenizer.special["pad_token"] = "<|im_end|>"
        assert (await server.post("/v1/embeddings", {"input": ["abc", "abcd"]})).status_code == 200
        pad, (_, _, _, last) = TOKEN["<|im_end|>"], picture_tokenizer().encode("abcd").ids
        assert [request.prompt.tolist()[3:] for request in core.requests] == [[pad] * 4, [last, *[pad] * 3]]
