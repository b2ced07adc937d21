"""Settings. One schema defines flags, `QUIRE_*` variables, TOML keys, `--help` and the table in the documentation."""
