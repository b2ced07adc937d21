"""The scheduler: tokens and blocks of each sequence in a step. Plain Python on ints."""
