"""Models: an architecture is a value (`spec`), one decoder runs it, `fallback` runs everything else."""
