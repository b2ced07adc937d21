"""Errors of ranks."""

from __future__ import annotations


class RankDied(Exception):
    """Another rank has ended, so that no step can be run any more."""


class NodesMissing(Exception):
    """Nodes have not come together: one is missing, cannot be reached, or does not fit the others."""


class RankRefused(Exception):
    """Another rank could not run a command; it goes on as before."""
