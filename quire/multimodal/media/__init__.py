"""Media that content parts of messages refer to."""
