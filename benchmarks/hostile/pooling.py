"""Bodies that ask for embeddings and scores: many inputs, long ones, large results."""

from __future__ import annotations

from typing import Any

from benchmarks.hostile.body import MEGABYTE, Hostile, Json, nested, token_ids, with_raw

EMBEDDINGS, POOLING, RERANK, SCORE = "/v1/embeddings", "/pooling", "/rerank", "/score"
COHERE, TEI, PREDICT = "/v2/embed", "/embed", "/predict"
_PARAGRAPH = "The quick brown fox jumps over the lazy dog. "
_MOST = 2048  # inputs of a request


def bodies() -> list[Hostile]:
    """All bodies of this kind."""
    return [*_many(), *_long(), *_large_results(), *_scores(), *_malformed()]


def _texts(count: int, text: str = "a short text") -> list[str]:
    return [f"{number} {text}" for number in range(count)]


def _many() -> list[Hostile]:
    lists = [token_ids(480)] * _MOST
    parts = {"content": [{"type": "text", "text": "x"}]}
    return [
        Hostile("embeddings: one text, ordinary", EMBEDDINGS, lambda: {"input": "a short text"}, control=True),
        Hostile("embeddings: 2,048 texts", EMBEDDINGS, lambda: {"input": _texts(_MOST)}),
        Hostile("embeddings: 200,000 texts", EMBEDDINGS, lambda: {"input": _texts(200_000)}),
        Hostile("embeddings: 120,000 lists of one token", EMBEDDINGS, lambda: {"input": [[1]] * 120_000}),
        Hostile(
            "embeddings: a million tokens, the last invalid", EMBEDDINGS, lambda: {"input": [*lists[1:], [99_999]]}
        ),
        Hostile("embeddings: 16,384 objects with a part", COHERE, lambda: {"inputs": [parts] * 16_384}),
        Hostile("embeddings: 200,000 types", COHERE, lambda: {"texts": ["x"], "embedding_types": ["float"] * 200_000}),
        Hostile("embeddings: 2,048 texts, all types", COHERE, lambda: _all_types(_MOST)),
        Hostile("predictions: 100,000 pairs", PREDICT, lambda: {"inputs": [["a", "b"]] * 100_000}),
    ]


def _all_types(count: int) -> Json:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    return {"texts": _texts(count), "embedding_types": kinds, "output_dimension": 64}


def _long() -> list[Hostile]:
    long = "a" * MEGABYTE
    return [
        Hostile("embeddings: a million letters", EMBEDDINGS, lambda: {"input": long}),
        Hostile("embeddings: 2 texts of a million letters, cut", TEI, lambda: {"inputs": [long] * 2, "truncate": True}),
        Hostile(
            "embeddings: 2 MB of words, cut to a token",
            EMBEDDINGS,
            lambda: {"input": _texts(2, "word " * 195_000), "truncate_prompt_tokens": 1},
        ),
        Hostile(
            "embeddings: an instruction for 2,048 texts",
            EMBEDDINGS,
            lambda: {"input": _texts(_MOST), "instruction": _PARAGRAPH * 180},
        ),
        Hostile("embeddings: 40 MB", EMBEDDINGS, lambda: {"input": [_PARAGRAPH * 1000] * 900}),
    ]


def _large_results() -> list[Hostile]:
    def of_tokens(dtype: str, form: str) -> Json:
        return {
            "model": "quire-nano-embed",
            "task": "token_embed",
            "input": [token_ids(500)] * 16,
            "embed_dtype": dtype,
            "encoding_format": form,
        }

    return [
        Hostile("pooling: vectors of 8,000 tokens", POOLING, lambda: of_tokens("float32", "float")),
        Hostile("pooling: vectors of 8,000 tokens, float8", POOLING, lambda: of_tokens("fp8_e4m3", "base64")),
        Hostile(
            "pooling: vectors of 60,000 tokens",
            POOLING,
            lambda: {**of_tokens("int8", "bytes"), "input": [token_ids(500)] * 120},
        ),
    ]


def _scores() -> list[Hostile]:
    document = _PARAGRAPH * 35

    def rerank(documents: Any, query: str = "fox", **fields: Any) -> Json:
        return {"query": query, "documents": documents, **fields}

    return [
        Hostile("rerank: 2,048 documents", RERANK, lambda: rerank(_texts(_MOST))),
        Hostile("rerank: 100 documents of 300 words", RERANK, lambda: rerank(_texts(100, document))),
        Hostile(
            "rerank: 500 documents of 6,000 letters, cut",
            RERANK,
            lambda: rerank(_texts(500, document * 4), max_tokens_per_doc=4),
        ),
        Hostile("rerank: a query of a million letters", RERANK, lambda: rerank(_texts(_MOST), query="a" * MEGABYTE)),
        Hostile("score: 2,048 pairs", SCORE, lambda: {"text_1": _texts(_MOST), "text_2": _texts(_MOST)}),
        Hostile("score: 2,048 by 2,047", SCORE, lambda: {"text_1": _texts(_MOST), "text_2": _texts(_MOST - 1)}),
    ]


def _malformed() -> list[Hostile]:
    long = "x" * 10 * MEGABYTE
    return [
        Hostile("depth: input", EMBEDDINGS, lambda: with_raw({}, input=nested(100_000))),
        Hostile("depth: a document", RERANK, lambda: with_raw({"query": "x"}, documents=f"[{nested(900)}]")),
        Hostile(
            "depth: variables of a rerank",
            RERANK,
            lambda: with_raw({"query": "x", "documents": ["x"]}, chat_template_kwargs=nested(190, '{"a": ', "1", "}")),
        ),
        Hostile("quoted: prompt name", EMBEDDINGS, lambda: {"input": "x", "prompt_name": long}),
        Hostile("quoted: task", POOLING, lambda: {"input": "x", "task": long}),
        Hostile("quoted: type of a part", COHERE, lambda: {"inputs": [{"content": [{"type": long}]}]}),
        Hostile("quoted: a document", RERANK, lambda: {"query": "x", "documents": ["x", {"text": {long: 1}}]}),
    ]
