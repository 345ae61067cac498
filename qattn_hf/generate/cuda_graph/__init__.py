"""Decode steps as CUDA graphs: which models can be captured, the captured steps, and their shared memory."""
