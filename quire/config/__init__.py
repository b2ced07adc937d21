"""Frozen settings values. One schema gives flags, `QUIRE_*` variables, TOML keys, `--help` and the docs' table."""
