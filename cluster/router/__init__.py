"""Places every request by cache locality and load."""
