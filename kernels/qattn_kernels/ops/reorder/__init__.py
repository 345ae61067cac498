"""Reorder the rows of a layer in place, for beam search."""
