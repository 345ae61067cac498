"""What a layer is made of: its settings as text, its state tensors, what kernels know of them."""
