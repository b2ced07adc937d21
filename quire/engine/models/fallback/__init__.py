"""Models that transformers' own code runs, in our engine."""
