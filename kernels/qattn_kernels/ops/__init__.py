"""The operations on a packed cache, a folder each: reference in plain PyTorch, kernels in Triton, their launch."""
