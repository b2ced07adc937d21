"""Endpoints that pool: embeddings, classes and scores, in the APIs of OpenAI, vLLM, Cohere, Jina and TEI."""
