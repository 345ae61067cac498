"""What a model is: kinds of its layers, heads, devices, and whether it is supported."""
