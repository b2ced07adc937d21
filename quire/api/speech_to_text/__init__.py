"""Transcriptions and translations of audio files."""
