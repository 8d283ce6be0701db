"""Ways to choose a worker, one file each."""
