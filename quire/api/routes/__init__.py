"""One file for each group of endpoints; each gives a router around the services it is handed."""
