"""The fused CPU backend: packed weights and a whole step in C++."""
