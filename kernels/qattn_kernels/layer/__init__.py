"""Parts of a layer: settings as text, state tensors, and the limits of kernels."""
