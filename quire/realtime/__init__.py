"""Realtime speech: WebSocket sessions at /v1/realtime, in the dialects of OpenAI (GA and beta) and vLLM."""
