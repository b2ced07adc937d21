"""Media: fetching, decoding and features of audio. Uses numpy, never torch."""
