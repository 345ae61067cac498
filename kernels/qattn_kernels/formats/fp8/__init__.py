"""FP8 E4M3 with one scale a token: a wider range inside a token than INT8's, a coarser step at its top."""
