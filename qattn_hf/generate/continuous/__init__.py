"""Continuous batching: many requests at once over one pool of packed pages, by transformers' own scheduler."""
