"""Random rotation of head dims: `reference.py` specifies, `kernel.py` computes, `launch.py` launches."""
