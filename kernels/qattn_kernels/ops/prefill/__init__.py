"""Attention of a long call over unpacked keys and values."""
