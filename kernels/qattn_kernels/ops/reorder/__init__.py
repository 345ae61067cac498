"""Rows of a layer in another order, in place, as beam search wants them."""
