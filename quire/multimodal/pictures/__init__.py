"""Pictures: their files, layouts and pixels. Needs NumPy and Pillow."""
