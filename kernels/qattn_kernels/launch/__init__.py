"""Shared by all kernel launches: the tensors of a call, compile-time constants, options."""
