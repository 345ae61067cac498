"""INT4 with one scale a token, two tokens of a block in a byte, behind a ring that holds a code a byte."""
