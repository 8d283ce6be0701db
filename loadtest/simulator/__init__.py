"""A cluster on a virtual clock: the real router, workers and links by a cost model."""
