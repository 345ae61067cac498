"""Continuous batching over a pool of packed pages, driven by Transformers' scheduler."""
