"""Packed blocks of a layer in fewer bits."""
