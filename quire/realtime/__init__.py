"""WebSocket sessions: events, audio buffer, voice activity. Empty until the realtime issue moves in."""
