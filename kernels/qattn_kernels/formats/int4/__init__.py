"""INT4 with one scale per token: two tokens of a block per byte, and a ring with one code per byte."""
