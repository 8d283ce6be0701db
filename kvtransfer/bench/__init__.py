"""One half of `make bench-transfer`: pairs of processes that move the same blocks by ours and by others' means."""
