"""Who gets how many tokens and which blocks in a step: plain Python on ints."""
