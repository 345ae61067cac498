"""What several kernels share inside Triton."""
