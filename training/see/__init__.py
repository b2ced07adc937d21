"""Trains quire-nano-see, the bundled model that reads pictures, on pictures that it draws."""
