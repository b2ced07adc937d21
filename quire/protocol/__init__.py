"""Request and response bodies of OpenAI's, vLLM's and Anthropic's APIs."""
