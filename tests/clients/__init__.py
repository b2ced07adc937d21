"""Client libraries of other projects with the bundled model, each in its own environment: see ``bin/test-clients``."""
