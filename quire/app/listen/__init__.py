"""`quire listen`: live text of what is said."""
