"""LlamaIndex: embeddings of OpenAI-like servers and of TEI, and TEI's reranker."""
# needs: llama-index-embeddings-openai-like llama-index-embeddings-text-embeddings-inference
# needs: llama-index-postprocessor-tei-rerank

from __future__ import annotations

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from texts import EMBEDDER, QUERY, SERVER, TEXTS, URL, ask, close, expected

for embedder in (
    OpenAILikeEmbedding(model_name=EMBEDDER, api_base=URL, api_key="none"),
    TextEmbeddingsInference(model_name=EMBEDDER, base_url=SERVER),
):
    assert close(embedder.get_text_embedding_batch(TEXTS), expected(TEXTS))
    assert close([embedder.get_query_embedding(QUERY)], expected([QUERY]))

order = [rank["index"] for rank in ask("/rerank", {"query": QUERY, "texts": TEXTS})]
nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
ranked = TextEmbeddingInference(base_url=SERVER, top_n=2).postprocess_nodes(nodes, query_str=QUERY)
assert [node.text for node in ranked] == [TEXTS[index] for index in order[:2]]
