"""Attention functions registered with Transformers: packed, over a stock cache, unpacked layers, observed."""
