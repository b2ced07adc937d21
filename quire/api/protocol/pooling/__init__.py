"""Request and response models of the endpoints that pool: embeddings, classes, scores."""
