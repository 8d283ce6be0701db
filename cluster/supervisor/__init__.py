"""Keeps the desired workers alive."""
