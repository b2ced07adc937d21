"""Trains quire-nano-hear, the bundled speech recognizer, on sentences that espeak-ng speaks."""
