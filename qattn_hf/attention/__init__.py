"""The attention functions that transformers calls: packed, of a stock cache, of the model itself, observed."""
