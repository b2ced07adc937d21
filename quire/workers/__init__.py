"""Worker processes for jobs of unpredictable cost, with limits of memory, time and stack."""
