"""Request and response models of the endpoints that pool: embeddings, classification, scores."""
