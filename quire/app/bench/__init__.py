"""`quire bench`: load generator and start-up timer for any OpenAI server and for our own."""
