"""Keep some of the tokens of every row, and free the blocks of the others."""
