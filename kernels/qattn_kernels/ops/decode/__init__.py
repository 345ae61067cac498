"""Attention of a short call: up to 32 queries over packed blocks, the ring and the new tokens."""
