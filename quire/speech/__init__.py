"""Speech to text: windows of audio become engine requests, whose tokens become text, segments and words."""
