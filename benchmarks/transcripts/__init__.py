"""Accuracy of transcripts and of their times: recordings of people, joined to long files with pauses."""
