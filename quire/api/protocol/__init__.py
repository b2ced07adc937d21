"""Bodies of requests and responses, as OpenAI and vLLM have them on the wire."""
