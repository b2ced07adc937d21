"""The parts of a decoder. What a layer needs is passed to it; there is no global context."""
