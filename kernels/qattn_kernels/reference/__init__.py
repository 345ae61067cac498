"""Attention in plain PyTorch: the specification of the kernels, and each paper's algorithm in `papers/`."""
