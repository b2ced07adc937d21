"""Interface of the engine: messages, transport, client, launch. It does not import torch."""
