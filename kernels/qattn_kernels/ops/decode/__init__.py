"""Attention of a short call: up to 32 queries over packed blocks, ring and their own tokens."""
