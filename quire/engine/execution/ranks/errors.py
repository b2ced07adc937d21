"""Errors of ranks."""

from __future__ import annotations


class RankDied(Exception):
    """Another rank has ended, so that no step can be run any more."""


class RankRefused(Exception):
    """Another rank could not run a command; it goes on as before."""
