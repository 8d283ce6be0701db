"""Paged attention: KV into the pool, attention through block tables."""
