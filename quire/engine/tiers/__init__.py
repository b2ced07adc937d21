"""Tiers of the prefix cache: computed KV blocks outside of the memory that steps read them from."""
