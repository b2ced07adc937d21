"""The parts of networks. What a layer needs is passed to it; there is no global context."""
