"""Distance of a packed cache from full precision, without labels: `qattn compare`, `retrieval`, `tune`, `inspect`."""
