"""The forward pass and the pool on an NVIDIA GPU."""
