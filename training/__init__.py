"""Training of quire-nano, the model bundled with Quire: text generators, training loop, evaluation, export."""
