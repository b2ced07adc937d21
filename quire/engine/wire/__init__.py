"""The engine's door: messages, transport, client, launch. No torch in here."""
