"""The served models, and how the sequences of one request are admitted, sampled and run."""
