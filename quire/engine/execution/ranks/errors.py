"""Errors of ranks."""

from __future__ import annotations


class RankDied(Exception):
    """Another rank has ended, so that no step can be run any more."""
