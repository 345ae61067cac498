"""One call of a layer as a registered operator: in plain PyTorch, in kernels, or over a stock cache."""
