"""Decode steps as CUDA graphs: what can be captured, the captured steps, and the memory that they share."""
