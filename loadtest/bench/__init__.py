"""Benchmarks of what runs without a model."""
