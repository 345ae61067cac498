"""`patch` and `unpatch`, and the hooks that they install on a model."""
