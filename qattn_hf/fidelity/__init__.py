"""Distance of a packed cache from full precision, without labels, for `qattn compare`, `retrieval`, `tune`, `inspect`."""
