"""Tokens taken back, and the ring in another size."""
