"""KV blocks over TCP: a prefiller's server of blocks, and a decoder's reader."""
