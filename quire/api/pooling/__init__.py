"""Endpoints that pool: embeddings, classification and scores, in the APIs of OpenAI, vLLM, Cohere, Jina and TEI."""
