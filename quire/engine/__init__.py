"""Everything between a prompt and its tokens. `wire` is the only door, `core` the only file to know both sides."""
