"""Messages and bytes in, prompts out: templates, tokenizers, and later media. numpy only, no torch."""
