"""Trains quire-nano-embed, the bundled sentence embedder, on pairs of texts that generators make."""
