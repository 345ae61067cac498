"""INT8 or INT4 with scales shared by groups of tokens, and an unquantized ring (SageAttention2's keys)."""
