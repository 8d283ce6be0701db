"""One file for each way to code blocks for a wire."""
