"""Speech to text: windows of audio become requests of the engine, and their tokens text, segments and words."""
