"""The endpoints of files."""
