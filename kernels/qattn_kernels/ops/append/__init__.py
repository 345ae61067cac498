"""Append new tokens to the ring buffer or the packed blocks, and quantize every block that is full."""
