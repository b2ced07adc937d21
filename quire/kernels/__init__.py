"""One op per file: the torch reference, beside it faster twins where there are any, and one function that chooses."""
