"""Cohere's client: v2 embeddings in several types, and rerank in both versions of its API."""
# needs: cohere>=7,<8

from __future__ import annotations

import cohere
from texts import EMBEDDER, QUERY, RERANKER, SERVER, TEXTS, close, expected, expected_order

client = cohere.ClientV2(api_key="none", base_url=SERVER)
answer = client.embed(
    model=EMBEDDER, texts=TEXTS, input_type="search_document", embedding_types=["float", "int8", "ubinary"]
)
assert close(answer.embeddings.float_, expected(TEXTS))
assert max(map(max, answer.embeddings.int8)) == 127 or min(map(min, answer.embeddings.int8)) == -127
assert len(answer.embeddings.ubinary) == len(TEXTS)
assert answer.meta.billed_units.input_tokens > 0

order = expected_order(QUERY, TEXTS)
ranked = client.rerank(model=RERANKER, query=QUERY, documents=TEXTS, top_n=2)
assert [result.index for result in ranked.results] == order[:2]
assert ranked.results[0].relevance_score >= ranked.results[1].relevance_score

first = cohere.Client(api_key="none", base_url=SERVER)
ranked = first.rerank(model=RERANKER, query=QUERY, documents=TEXTS, return_documents=True)
assert [result.index for result in ranked.results] == order
assert ranked.results[0].document.text == TEXTS[order[0]]
