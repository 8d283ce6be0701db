"""Starts and stops Ray and its actors."""
