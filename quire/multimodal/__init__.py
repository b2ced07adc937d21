"""From messages and text to prompts: chat templates and tokenizers. Uses numpy, never torch."""
