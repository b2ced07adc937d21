"""Replicas: several engines of one model behind one front end, and which of them gets a request."""
