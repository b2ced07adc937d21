"""How long tests wait for a server."""

PATIENCE = 120.0  # seconds: more than anything takes on a busy machine
