"""What a model consists of, as values: layers, encoders, ropes, poolers. Without torch."""
