"""Describe a model: kinds of its layers, heads, devices, and whether it is supported."""
