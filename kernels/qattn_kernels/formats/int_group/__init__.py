"""INT8 or INT4 whose tokens share scales in groups, behind a ring in the model's precision (SageAttention2's keys)."""
