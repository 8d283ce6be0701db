"""Pools in the memory of an NVIDIA GPU: the copy kernel and what launches it."""
