"""Client APIs in, worker streams out."""
