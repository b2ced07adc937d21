"""`quire listen`: live transcription in a terminal."""
