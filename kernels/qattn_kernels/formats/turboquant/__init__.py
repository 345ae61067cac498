"""TurboQuant: one norm per block of channels, one code per channel in the Lloyd-Max codebook of the unit normal."""
