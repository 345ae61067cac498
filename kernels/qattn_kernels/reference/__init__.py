"""Attention in plain PyTorch: the specification of what kernels compute."""
