"""FP8 E4M3 values with one scale a channel of a block, or of all of a row, behind a ring in the model's precision."""
