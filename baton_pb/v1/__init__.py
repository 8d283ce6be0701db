"""Generated code of the protocol's first version."""
