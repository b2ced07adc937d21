"""Haystack: embedders of OpenAI's API and of TEI, and TEI's ranker."""
# needs: haystack-ai>=3.4,<4 huggingface-api-haystack

from __future__ import annotations

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPITextEmbedder
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from texts import EMBEDDER, QUERY, SERVER, TEXTS, URL, ask, close, expected

key = Secret.from_token("none")
single = OpenAITextEmbedder(api_key=key, model=EMBEDDER, api_base_url=URL).run(QUERY)
assert close([single["embedding"]], expected([QUERY]))
documents = OpenAIDocumentEmbedder(api_key=key, model=EMBEDDER, api_base_url=URL, progress_bar=False)
embedded = documents.run([Document(content=text) for text in TEXTS])["documents"]
assert close([document.embedding for document in embedded], expected(TEXTS))

tei = HuggingFaceAPITextEmbedder(
    api_type="text_embeddings_inference", api_params={"url": SERVER}, token=key, normalize=True
)
assert close([tei.run(QUERY)["embedding"]], expected([QUERY]))

order = [rank["index"] for rank in ask("/rerank", {"query": QUERY, "texts": TEXTS})]
ranker = HuggingFaceTEIRanker(url=SERVER, top_k=2, token=key)
ranked = ranker.run(query=QUERY, documents=[Document(content=text) for text in TEXTS])["documents"]
assert [document.content for document in ranked] == [TEXTS[index] for index in order[:2]]
