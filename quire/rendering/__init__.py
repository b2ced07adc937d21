"""Prompts: chat templates, tokenizers, and what turns messages and texts into token ids. Without torch."""
