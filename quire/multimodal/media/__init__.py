"""What content parts of messages refer to."""
