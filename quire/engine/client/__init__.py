"""The front end's side of the engine: the client, messages and their transport, streams of tokens. Without torch."""
