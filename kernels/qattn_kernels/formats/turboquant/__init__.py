"""TurboQuant: a norm a block of channels, and one code a channel in the Lloyd-Max codebook of the unit normal."""
