"""Composition root: commands, the app, middleware; the only room that sees all others."""
