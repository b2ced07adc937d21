"""Other projects' clients against the bundled model, in environments of their own: see ``bin/test-clients``."""
