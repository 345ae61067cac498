"""`patch` and `unpatch`, and the hooks that they put on a model."""
