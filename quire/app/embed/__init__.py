"""`quire embed`: embeddings of a corpus."""
