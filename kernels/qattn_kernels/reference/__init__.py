"""Attention in plain PyTorch: the specification of what kernels compute; and each paper's own, in `papers/`."""
