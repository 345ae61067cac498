"""Random rotation of head dims: specified in `reference.py`, computed in `kernel.py`."""
