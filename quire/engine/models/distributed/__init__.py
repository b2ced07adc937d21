"""Ranks: their groups, links and collectives, and which rank has which layers."""
