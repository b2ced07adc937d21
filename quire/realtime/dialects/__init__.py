"""The wire formats of sessions: OpenAI's GA and beta, and vLLM's."""
