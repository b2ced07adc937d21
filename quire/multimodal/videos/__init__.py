"""Videos: which of their frames are read, what stands for these in a prompt, and their pixels."""
