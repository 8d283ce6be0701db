"""Times that a worker keeps to whatever its config, and so a simulated one as well. Seconds."""

REPORT_INTERVAL_S = 0.03
"""Shortest time between two reports of load and cache: what changes meanwhile is told together."""
FETCH_MAX_S = 5.0
"""Longest time for a fetch of blocks from another worker: what takes longer is computed sooner."""
