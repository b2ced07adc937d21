"""GGUF files: their container and blocks, and what their metadata says as a Hugging Face model folder."""
