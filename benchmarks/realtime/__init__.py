"""Realtime sessions at the pace at which people speak."""
