"""INT8 values with one scale a block, or one for all of a row, behind a ring in the model's precision."""
