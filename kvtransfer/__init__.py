"""Moving KV blocks between processes."""
