"""How quire-nano, the model that comes with Quire, is made: text generators, training loop, evaluation, export."""
