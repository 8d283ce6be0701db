"""One file for each way to move bytes."""
