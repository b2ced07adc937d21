"""What tests share: a small tokenizer, tiny models, an engine without HTTP, a core without a model."""
