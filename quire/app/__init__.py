"""The composition root: commands, the ASGI app and its middleware. The only package that may import all others."""
