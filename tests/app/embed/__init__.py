"""`quire embed`."""
