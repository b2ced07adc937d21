"""/v1/responses: stored conversations of items, streamed as events."""
