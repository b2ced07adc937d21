"""Tiny models that embed and rank pictures, served as users do it: what comes out is what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import torch
from openai.types import CreateEmbeddingResponse
from PIL import Image

from tests.support.picture_chat import image_url
from tests.support.pictures import drawn, encoded
from tests.support.process import ServerProcess, serving
from tests.support.retrieval_models import (
    make_dual_encoder,
    make_late_interaction,
    picture_embedding,
    save_dual_encoder,
    save_late_interaction,
    text_embedding,
    token_embeddings,
)
from tests.support.tiny_configs import VOCAB
from tests.support.tokenizer import with_placeholders
from tests.support.vision_models import PICTURE, SEES, expected_hidden, make_composite, save_seeing

pytestmark = pytest.mark.slow
PAD = "<|image_pad|>"
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|endoftext|>",
    "<bos>",
    "<no>",
    "<yes>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURES = [drawn(60, 44), drawn(30, 90, seed=3), drawn(44, 44, seed=5)]


def write_tokenizer(folder: Path, placeholder: str = PAD) -> tokenizers.Tokenizer:
    """Bytes and special tokens, the placeholder where the models have it."""
    tokenizer = with_placeholders(SPECIAL, {PICTURE: placeholder}, VOCAB)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|endoftext|>", "bos_token": "<bos>"}))
    return tokenizer


class Served:
    """The models, and a server of them."""

    def __init__(self, root: Path) -> None:
        self.embedder = make_composite("qwen3_vl", seed=4)
        self.ranker = make_composite("qwen3_vl", seed=6)
        self.colqwen = make_late_interaction("qwen2_vl")
        self.colpali = make_late_interaction("paligemma")
        self.clip = make_dual_encoder("clip")
        self.folders = {
            "embedder": save_seeing(self.embedder, "qwen3_vl", root / "embedder"),
            "ranker": save_seeing(self.ranker, "qwen3_vl", root / "ranker"),
            "colqwen": save_late_interaction(self.colqwen, "qwen2_vl", root / "colqwen"),
            "colpali": save_late_interaction(self.colpali, "paligemma", root / "colpali"),
            "clip": save_dual_encoder(self.clip, "clip", root / "clip"),
        }
        for folder in self.folders.values():
            self.tokenizer = write_tokenizer(folder)
        write_tokenizer(self.folders["colpali"], "<image>")
        for name in ("embedder", "ranker", "colqwen"):
            (self.folders[name] / "chat_template.jinja").write_text(TEMPLATE)
        config = json.loads((self.folders["ranker"] / "config.json").read_text())
        config |= {"architectures": ["Qwen3VLForSequenceClassification"], "classifier_from_token": ["<no>", "<yes>"]}
        config["text_config"]["max_position_embeddings"] = 1024  # its prompts of bytes are long
        (self.folders["ranker"] / "config.json").write_text(json.dumps(config))
        self.server: ServerProcess

    def ids(self, text: str, pictures: list[Image.Image], case: str) -> list[int]:
        """The tokens of a text, with those of its pictures."""
        grids: Any = [] if not pictures else SEES[case].inputs(SEES[case].processor, pictures)["image_grid_thw"]
        for grid in grids:
            text = text.replace(PAD, "<unused1>" * (int(grid.prod()) // 4), 1)
        ids: list[int] = self.tokenizer.encode(text.replace("<unused1>", PAD)).ids
        return ids

    def post(self, path: str, name: str, **body: Any) -> Any:
        with self.server.http as client:
            response = client.post(path, json={**body, "model": str(self.folders[name])})
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--convert", "embed")
    with serving(*map(str, made.folders.values()), *options, "--max-num-batched-tokens", "64") as made.server:
        yield made


def picture(index: int) -> dict[str, Any]:
    return image_url(encoded(PICTURES[index]))


def embedded(served: Served, text: str, pictures: list[Image.Image]) -> torch.Tensor:
    hidden = expected_hidden(served.embedder, "qwen3_vl", served.ids(text, pictures, "qwen3_vl"), pictures)
    return torch.nn.functional.normalize(hidden[-1], dim=-1)


def assert_ranked(answer: Any, expected: list[float]) -> None:
    """The scores, and their order."""
    results = answer["results"]
    assert [result["index"] for result in results] == np.argsort(-np.array(expected)).tolist()
    scores = {result["index"]: result["relevance_score"] for result in results}
    assert [scores[index] for index in range(len(expected))] == pytest.approx(expected, abs=1e-4)


def test_conversations(served: Served) -> None:
    """The openai client has a method for `input` only; its `post` is what vLLM's documentation shows."""
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0)
    content = [picture(0), {"type": "text", "text": "what"}, picture(1)]
    body = {"messages": [{"role": "user", "content": content}], "model": str(served.folders["embedder"])}
    marker = f"<|vision_start|>{PAD}<|vision_end|>"
    text = f"<|im_start|>user\n{marker}what{marker}<|im_end|>\n"
    for end, options in (("", {}), ("<|im_start|>assistant\n", {"add_generation_prompt": True})):
        answer = client.post("/embeddings", body={**body, **options}, cast_to=CreateEmbeddingResponse)
        expected = embedded(served, text + end, PICTURES[:2])
        torch.testing.assert_close(torch.tensor(answer.data[0].embedding), expected, atol=1e-4, rtol=0)
    assert served.server.metric("mm_cache_hits_total") >= 2, "the same pictures were prepared again"


def test_an_embedder_ranks_pictures_and_texts(served: Served) -> None:
    documents = [picture(0), "a text", {"content": [picture(1), {"type": "text", "text": "page"}]}]
    answer = served.post("/rerank", "embedder", query="which", documents=documents, instruction="find")
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    marker = f"<|vision_start|>{PAD}<|vision_end|>"
    query = embedded(served, f"<|im_start|>system\nfind<|im_end|>\n{start}which{end}", [])
    vectors = [
        embedded(served, f"{start}{marker}{end}", PICTURES[:1]),
        embedded(served, f"{start}a text{end}", []),
        embedded(served, f"{start}{marker}page{end}", PICTURES[1:2]),
    ]
    assert_ranked(answer, [float(query @ vector) for vector in vectors])


def test_a_reranker_reads_pairs(served: Served) -> None:
    """Qwen3-VL-Reranker: the probability of yes, against no."""
    documents = ["a text", picture(1), {"content": [{"type": "text", "text": "page"}, picture(2)]}]
    query = {"content": [picture(0), {"type": "text", "text": "q"}]}
    answer = served.post("/v1/rerank", "ranker", query=query, documents=documents)
    system = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "search query, retrieve relevant candidates that answer the query."
    )
    marker = f"<|vision_start|>{PAD}<|vision_end|>"
    expected = []
    for text, pictures in (("a text", []), (marker, [PICTURES[1]]), (f"page{marker}", [PICTURES[2]])):
        prompt = f"{system}<Query>:{marker}q\n<Document>:{text}<|im_end|>\n<|im_start|>assistant\n"
        shown = [PICTURES[0], *pictures]
        hidden = expected_hidden(served.ranker, "qwen3_vl", served.ids(prompt, shown, "qwen3_vl"), shown)
        with torch.inference_mode():
            logits = served.ranker.lm_head(hidden[-1])
        no, yes = (logits[served.tokenizer.token_to_id(word)] for word in ("<no>", "<yes>"))
        expected.append(float((yes - no).sigmoid()))
    assert_ranked(answer, expected)
    text_only = served.post("/score", "ranker", text_1="q", text_2="a text")["data"][0]["score"]
    mixed = served.post("/score", "ranker", text_1=["q", "q"], text_2=["a text", picture(0)])["data"]
    assert mixed[0]["score"] == pytest.approx(text_only, abs=1e-6)


def test_late_interaction(served: Served) -> None:
    documents = [picture(index) for index in range(3)]
    answer = served.post("/rerank", "colqwen", query="which", documents=documents)
    prompt = served.ids("Query: which" + "<|endoftext|>" * 10 + "\n", [], "qwen2_vl")
    query = token_embeddings(served.colqwen, "qwen2_vl", prompt, [])
    text = f"<|im_start|>user\n<|vision_start|>{PAD}<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
    pages = []
    for shown in PICTURES:
        prompt = served.ids(text, [shown], "qwen2_vl")
        pages.append(token_embeddings(served.colqwen, "qwen2_vl", prompt, [shown]))
    assert_ranked(answer, [float((query @ page.T).amax(1).sum()) for page in pages])
    message = {"role": "user", "content": [picture(0)]}
    vectors = served.post("/pooling", "colqwen", messages=[message])["data"][0]["data"]
    torch.testing.assert_close(torch.tensor(vectors), pages[0], atol=1e-4, rtol=0)


def test_late_interaction_in_both_directions(served: Served) -> None:
    """ColPali: each prompt is computed in one step."""
    answer = served.post("/rerank", "colpali", query="which", documents=[*map(picture, range(3)), "a text"])
    prompt = served.ids("<bos>Question: which" + "<|endoftext|>" * 10 + "\n", [], "paligemma")
    query = token_embeddings(served.colpali, "paligemma", prompt, [])
    text = [PICTURE] * 4 + served.ids("<bos>Describe the image.\n", [], "paligemma")
    pages = [token_embeddings(served.colpali, "paligemma", text, [shown]) for shown in PICTURES]
    pages.append(token_embeddings(served.colpali, "paligemma", served.ids("<bos>a text\n", [], "paligemma"), []))
    assert_ranked(answer, [float((query @ page.T).amax(1).sum()) for page in pages])
    vectors = served.post("/pooling", "colpali", messages=[{"role": "user", "content": [picture(0)]}])
    torch.testing.assert_close(torch.tensor(vectors["data"][0]["data"]), pages[0], atol=1e-4, rtol=0)


def test_texts_and_pictures_in_one_space(served: Served) -> None:
    answer = served.post("/v1/rerank", "clip", query="red", documents=[picture(0), picture(1), "blue"])
    query, last = (text_embedding(served.clip, served.tokenizer.encode(text).ids) for text in ("red", "blue"))
    pictures = [picture_embedding(served.clip, "clip", shown) for shown in PICTURES[:2]]
    assert_ranked(answer, [float(query @ vector) for vector in (*pictures, last)])
