"""What both planes share: errors, configuration, hashing, text, names of metrics."""
