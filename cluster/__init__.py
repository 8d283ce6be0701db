"""The control plane: gateway, router, supervisor, command line."""
