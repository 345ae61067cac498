"""Text read through a model: its chunks, the tokens that are scored, and what packed layers lose of them."""
