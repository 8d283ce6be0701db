"""Arrivals, timed clients, metrics, reports and the simulator."""
