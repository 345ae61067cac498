"""Read texts through a model: chunks, scored tokens, and the loss that packed layers cause."""
