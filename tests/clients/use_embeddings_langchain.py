"""LangChain: OpenAIEmbeddings and CohereRerank."""
# needs: langchain-openai>=1.7,<2 langchain-cohere

from __future__ import annotations

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings
from texts import EMBEDDER, QUERY, RERANKER, SERVER, TEXTS, URL, close, expected, expected_order

# Without this check texts would be cut by OpenAI's tokenizer, whose tokens mean something else to this model.
embeddings = OpenAIEmbeddings(base_url=URL, api_key="none", model=EMBEDDER, check_embedding_ctx_length=False)
assert close(embeddings.embed_documents(TEXTS), expected(TEXTS))
assert close([embeddings.embed_query(QUERY)], expected([QUERY]))

rerank = CohereRerank(cohere_api_key="none", base_url=SERVER, model=RERANKER, top_n=2)
ranked = rerank.compress_documents([Document(text) for text in TEXTS], QUERY)
assert [document.page_content for document in ranked] == [TEXTS[i] for i in expected_order(QUERY, TEXTS)[:2]]
assert ranked[0].metadata["relevance_score"] >= ranked[1].metadata["relevance_score"]
